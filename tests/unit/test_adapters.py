"""Adapters answer as PEFT computes them over transformers' own text model, whatever else is in batch or cache."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.checkpoint import Checkpoint
from common.errors import InvalidRequest, StartupError
from services.generation.adapter_files import AdapterFolder, load_adapters
from services.generation.families import load_language_model
from services.generation.families.language_model import LanguageModel
from tests.adapters import write_adapter
from tests.law import Question, answer, assert_law, question
from tests.oracle import Text, expected_logprobs, expected_sequence
from tests.tiny import PAD_ID, Models, TinyEngine, load_models, random_item
from tests.unit.test_graphs import Recorder

# Each of LoraConfig's fields that decide a result; "whole" were trained on the whole model, the others on its text.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"]},
    "every-linear": {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.5},
    "patterns": {
        "r": 4,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": ["q_proj", "k_proj", "o_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "o_proj": 6},
        "alpha_pattern": {r"layers\.[02]\..*k_proj": 11},
    },
    "some-layers": {
        "r": 3,
        "target_modules": ["q_proj", "v_proj", "o_proj"],
        "exclude_modules": ["layers.2.self_attn.o_proj"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
    "whole": {
        "r": 3,
        "lora_alpha": 9,
        "target_modules": r"model\.language_model\..*\.(q|k|v|o)_proj",
        "rank_pattern": {r"model\.language_model\.layers\.1\.self_attn\.k_proj": 5},
    },
}
ASKING = Question((Text(tuple(range(20, 40))),), 6)


@dataclass(frozen=True)
class Adapted:
    """A model with every adapter of CONFIGS, and the text models with one each as PEFT computes them."""

    models: Models
    folder: Path
    text: Mapping[str, nn.Module]


@pytest.fixture(scope="module")
def adapted(family: str, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(family)
    models = load_models(family, folder / "model")
    reference = models.reference
    text: dict[str, nn.Module] = {}
    for seed, (name, config) in enumerate(CONFIGS.items()):
        if name == "whole":
            text[name] = write_adapter(reference, folder / name, seed, **config).model.language_model
        else:
            text[name] = write_adapter(reference.model.language_model, folder / name, seed, **config)
    load_adapters([AdapterFolder(name, folder / name) for name in CONFIGS], models.engine)
    return Adapted(models, folder, text)


def engine_of(folder: Path, *adapters: AdapterFolder) -> LanguageModel:
    model = load_language_model(Checkpoint(folder), torch.float32, torch.device("cpu"))
    load_adapters(adapters, model)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_answers_are_those_of_peft_over_transformers_own_text_model(adapted: Adapted, name: str) -> None:
    video = random_item(adapted.models.family, (3, 2, 3), Fraction(1), rate=0.5)
    asking = Question((Text((20, 21, 22)), video, Text((30, 31))), 6, adapter=name)
    engine = TinyEngine(adapted.models.engine)
    asked = answer(engine, [asking])
    assert_law(adapted.models, engine, [asking], asked, adapted=adapted.text)
    expected = expected_sequence(asking.parts, asking.kept, PAD_ID)
    reference = adapted.models.reference
    plain = expected_logprobs(
        reference.model.language_model, reference.lm_head, expected, asking.items, asked[0].answer
    )
    own = torch.stack(engine.runner.logits["0"]).log_softmax(dim=-1)
    assert float((own - plain).abs().max()) > 0.01, "an adapter that changes nothing proves nothing"


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_neighbours_with_other_adapters_and_none_change_nothing(adapted: Adapted, data: st.DataObject) -> None:
    named = st.sampled_from((None, *CONFIGS))
    asking = data.draw(question(adapted.models.family))
    others = data.draw(st.lists(question(adapted.models.family), min_size=1, max_size=3))
    questions = [replace(each, adapter=data.draw(named)) for each in (asking, *others, asking)]
    questions.append(replace(asking, adapter=data.draw(named), answers=data.draw(st.integers(1, 2))))
    engine = TinyEngine(
        adapted.models.engine,
        blocks=max(each.most_blocks for each in questions) + data.draw(st.sampled_from((0, 4, 64))),
        chunk_tokens=data.draw(st.sampled_from((1, 3, 8, 64, 512))),
        max_running=data.draw(st.integers(1, 5)),
        guess_tokens=data.draw(st.sampled_from((0, 3))),
    )
    asked = answer(engine, questions, data.draw(st.lists(st.integers(0, 8), max_size=5)))
    event(f"adapters: {len({each.adapter for each in questions})}")
    event(f"preempted: {engine.engine.stats().totals.preemptions > 0}")
    assert_law(adapted.models, engine, questions, asked, adapted=adapted.text)


def test_a_prefix_is_found_again_by_the_same_adapter_alone(adapted: Adapted, tmp_path: Path) -> None:
    """By its content: the same files by another name share, files that differ in one weight or in alpha do not."""
    models = adapted.models
    twin, changed = tmp_path / "twin", tmp_path / "changed"
    shutil.copytree(adapted.folder / "plain", twin)
    shutil.copytree(adapted.folder / "plain", changed)
    rewrite(changed, lambda weights: next(iter(weights.values())).view(-1)[:1].add_(1e-6))
    folders = [AdapterFolder(path.name, path) for path in (adapted.folder / "plain", twin, changed)]
    folders.append(replace(spoiled(adapted, tmp_path / "louder", lora_alpha=8), name="louder"))
    engine = TinyEngine(engine_of(models.folder, *folders))
    cached = []
    for name in (None, "plain", "changed", "louder", "plain", "twin", "louder", None):
        asked = answer(engine, [replace(ASKING, adapter=name)])
        cached.append(asked[0].request.cached_tokens)
    assert cached == [0, 0, 0, 0, 16, 16, 16, 16]


def test_further_answers_to_a_prompt_are_the_adapter_s_too(adapted: Adapted) -> None:
    engine, asking = TinyEngine(adapted.models.engine), replace(ASKING, adapter="plain", answers=3)
    asked = answer(engine, [asking])
    assert len(asked[0].others) == 2
    for each in (*asked, *asked[0].others):
        assert_law(adapted.models, engine, [asking], [each], adapted=adapted.text)


def test_media_that_another_adapter_has_seen_come_again(adapted: Adapted) -> None:
    video = random_item(adapted.models.family, (3, 2, 3), Fraction(1), rate=0.5)
    asking = Question((Text((20, 21, 22)), video, Text((30, 31))), 4)
    engine = TinyEngine(adapted.models.engine)
    questions = [replace(asking, adapter=name) for name in ("plain", "patterns", None, "plain")]
    asked = [answer(engine, [each])[0] for each in questions]
    assert [each.spared for each in asked] == [(), (), (), (0,)]
    assert_law(adapted.models, engine, questions, asked, adapted=adapted.text)


def test_only_steps_without_adapters_are_replayed(adapted: Adapted) -> None:
    capture, engine = Recorder(), TinyEngine(adapted.models.engine)
    engine.runner.capture_decoding(4, 256, capture)
    questions = [replace(ASKING, adapter="plain", new_tokens=5), replace(ASKING, new_tokens=9)]
    asked = answer(engine, questions)
    # Both begin in one step, so the last four tokens of the longer answer are decoded alone.
    assert capture.replayed == [1] * 4
    assert_law(adapted.models, engine, questions, asked, adapted=adapted.text)


# --- refusals -----------------------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def spoiled(adapted: Adapted, to: Path, **config: Any) -> AdapterFolder:
    shutil.copytree(adapted.folder / "plain", to)
    path = to / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return AdapterFolder("mine", to)


@pytest.fixture(scope="module")
def bare(adapted: Adapted) -> LanguageModel:
    return engine_of(adapted.models.folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, r"peft_type = 'IA3' is not supported"),
        ({"bias": "all"}, r"bias = 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\] is not supported"),
        ({"use_dora": True}, r"use_dora = True is not supported"),
        ({"lora_bias": True}, r"lora_bias = True is not supported"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, r"target_parameters = \['mlp.experts.gate_up_proj'\]"),
        ({"trainable_token_indices": [1, 2]}, r"trainable_token_indices = \[1, 2\] is not supported"),
        ({"layer_replication": [[0, 2], [1, 3]]}, r"layer_replication = \[\[0, 2\], \[1, 3\]\] is not supported"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights = 'pissa' is not supported"),
        ({"use_bdlora": {"nblocks": 2}}, r"use_bdlora = \{'nblocks': 2\} is not supported"),
        ({"use_next_year": 0.5}, r"use_next_year = 0.5 is not known to PEFT \d"),
        ({"r": 0}, r"r = 0 is not supported: Input should be greater than 0"),
        ({"use_rslora": "false"}, r"use_rslora = 'false' is not supported"),
        ({"rank_pattern": ["q_proj"]}, r"rank_pattern = \['q_proj'\] is not supported"),
        ({"rank_pattern": {"q_proj": "3"}}, r"rank_pattern = \{'q_proj': '3'\} is not supported"),
        ({"alpha_pattern": {"*": 8}}, r"adapter_config.json: .*\(\*\).* is no pattern: nothing to repeat"),
        ({"target_modules": "("}, r"adapter_config.json: '\(' is no pattern: missing \)"),
        ({"target_modules": "a{99999999999}"}, r"the repetition number is too large"),
        ({"target_modules": 5}, r"target_modules = 5 is not supported"),
        ({"target_modules": ["q_proj", 5]}, r"target_modules = \['q_proj', 5\] is not supported"),
        ({"target_modules": "all-linear"}, r"holds weights of .*_proj, which target_modules = 'all-linear' does not"),
        ({"exclude_modules": "("}, r"adapter_config.json: '\(' is no pattern: missing \)"),
        ({"layers_to_transform": "0"}, r"layers_to_transform = '0' is not supported"),
        ({"lora_alpha": float("nan")}, r"lora_alpha = nan is not supported: Input should be a finite number"),
        ({"lora_alpha": 10**400}, r"lora_alpha = 10+ is not supported"),
        ({"lora_alpha": 1e300}, r"weights of .*_proj, scaled by 3.3+\d?e\+299, are not finite as torch.float32"),
        ({"r": 4}, r"q_proj.lora_A must be \[4, 64\] by adapter_config.json and this model, it is \[3, 64\]"),
        ({"lora_alpha": "7"}, r"lora_alpha = '7' is not supported: Input should be a valid number"),
        ({"target_modules": None}, r"target_modules = None names no layer"),
        ({"target_modules": ["q_proj"]}, r"holds weights of .*v_proj, which target_modules = \['q_proj'\] does not"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, r"lacks weights of .*o_proj, which .* means"),
        (
            {"layers_to_transform": [0], "layers_pattern": "layers"},
            r"holds weights of layers.1.*, which target_modules = .* does not mean",
        ),
    ],
)
def test_what_is_not_computed_as_it_says_refuses_to_start(
    adapted: Adapted, bare: LanguageModel, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=rf"--adapters mine={tmp_path}/spoiled: .*{message}"):
        load_adapters([spoiled(adapted, tmp_path / "spoiled", **config)], bare)


KEYS = "base_model.model."


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("lm_head.lora_A.weight", "neither experts, embeddings, the output layer nor the vision tower"),
        ("embed_tokens.lora_embedding_A", "only linear layers of the language model's blocks"),
        ("visual.blocks.0.attn.qkv.lora_A.weight", "visual.blocks.0.attn.qkv.lora_A.weight; only linear layers"),
        ("layers.0.mlp.experts.0.gate_proj.lora_A.weight", "experts.0.gate_proj.lora_A.weight; only linear layers"),
        ("layers.9.self_attn.q_proj.lora_A.weight", "layers.9.self_attn.q_proj.lora_A.weight; only linear layers"),
        ("layers.0.self_attn.k_proj.lora_A.weight", "lora_A of layers.0.self_attn.k_proj and lacks its counterpart"),
        ("model.layers.0.self_attn.k_proj.lora_A.weight", r"layers of one model, it has \['', 'model.'\]"),
        ("layers.0.self_attn.q_proj.lora_magnitude_vector", "lora_magnitude_vector; only linear layers"),
    ],
)
def test_weights_of_anything_else_refuse_to_start(
    adapted: Adapted, bare: LanguageModel, tmp_path: Path, key: str, message: str
) -> None:
    folder = spoiled(adapted, tmp_path / "spoiled")
    rewrite(folder.path, lambda weights: weights.update({KEYS + key: torch.zeros(3, 64)}))
    with pytest.raises(StartupError, match=message):
        load_adapters([folder], bare)


@pytest.mark.parametrize("side", ["A", "B"])
def test_weights_that_are_not_finite_refuse_to_start(
    adapted: Adapted, bare: LanguageModel, tmp_path: Path, side: str
) -> None:
    folder, key = spoiled(adapted, tmp_path / "spoiled"), f"{KEYS}layers.1.self_attn.v_proj.lora_{side}.weight"
    rewrite(folder.path, lambda weights: weights[key].view(-1)[-1:].fill_(float("nan")))
    with pytest.raises(StartupError, match=r"weights of layers.1.self_attn.v_proj, .*, are not finite"):
        load_adapters([folder], bare)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("adapter_config.json", "the folder holds no adapter_config.json"),
        ("adapter_model.safetensors", "holds no adapter_model.safetensors, and no other format is read"),
    ],
)
def test_a_folder_that_lacks_a_file_refuses_to_start_and_nothing_is_unpickled(
    adapted: Adapted, bare: LanguageModel, tmp_path: Path, missing: str, message: str
) -> None:
    folder = spoiled(adapted, tmp_path / "spoiled")
    torch.save(load_file(folder.path / "adapter_model.safetensors"), folder.path / "adapter_model.bin")
    (folder.path / missing).unlink()
    with pytest.raises(StartupError, match=message):
        load_adapters([folder], bare)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_config.json", b"{", "is no JSON object with a peft_type"),
        ("adapter_config.json", b"[]", "is no JSON object with a peft_type"),
        ("adapter_config.json", b'{"r": 8}', "is no JSON object with a peft_type"),
        ("adapter_config.json", b"[" * 100_000, "--adapters mine=.*maximum recursion depth exceeded"),
        ("adapter_model.safetensors", b"not weights", "cannot be read"),
    ],
)
def test_a_broken_file_refuses_to_start(
    adapted: Adapted, bare: LanguageModel, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    folder = spoiled(adapted, tmp_path / "spoiled")
    (folder.path / name).write_bytes(content)
    with pytest.raises(StartupError, match=message):
        load_adapters([folder], bare)


def test_a_folder_that_cannot_be_read_refuses_to_start(bare: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--adapters mine=.*: \[Errno \d+\] File name too long"):
        load_adapters([AdapterFolder("mine", tmp_path / ("a" * 300))], bare)


def test_an_adapter_of_another_base_model_or_a_later_peft_loads_where_its_shapes_fit(
    adapted: Adapted, tmp_path: Path
) -> None:
    without_effect = {"base_model_name_or_path": "someone/else-7B", "fan_in_fan_out": True, "inference_mode": False}
    later = {"use_next_year": False, "next_year_config": None}
    model = engine_of(adapted.models.folder, spoiled(adapted, tmp_path / "other", **without_effect, **later))
    assert model.adapters.find("mine").name == "mine"


def test_a_model_takes_its_adapters_at_once(adapted: Adapted) -> None:
    with pytest.raises(AssertionError, match="the model has adapters already"):
        load_adapters([AdapterFolder("more", adapted.folder / "plain")], adapted.models.engine)


def test_without_peft_adapters_refuse_to_start_and_say_what_to_install(
    adapted: Adapted, bare: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    load_adapters([], bare)
    with pytest.raises(StartupError, match=r"needs PEFT, which is not installed: pip install 'framesieve\[lora\]'"):
        load_adapters([AdapterFolder("mine", adapted.folder / "plain")], bare)


def test_a_name_that_no_adapter_has_is_refused_with_those_there_are(adapted: Adapted) -> None:
    names = ", ".join(CONFIGS)
    with pytest.raises(InvalidRequest, match=rf"adapter must be one of {names}, got 'no-such'"):
        adapted.models.engine.adapters.find("no-such")
