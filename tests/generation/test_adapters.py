"""Adapters compute what PEFT computes over transformers' text model; files that cannot be computed are refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gridsieve.common.adapter_folder import AdapterFolder
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.compute import packed_linear
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.loading.draft_head import load_draft_head
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.startup.adapters import load_adapters
from tests.adapters import write_adapter
from tests.drafts import SPECFORGE, write_head
from tests.generation.paged_kernels import layers_by_flash_infer, use_paged
from tests.generation.recorder import Recorder
from tests.law import Question, answer, assert_law, question
from tests.oracle import Text
from tests.tiny import Models, TinyEngine, load_models, random_item

# Covers every field of LoraConfig that changes results. "whole" is trained on the whole model, with its tower, the
# others on its text.
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
        "target_modules": r"model\.(language_model\..*\.(q|k|v|o)_proj|(visual|vision_tower)\..*(qkv|fc1|v_proj))",
        "rank_pattern": {r"model\.language_model\.layers\.1\.self_attn\.k_proj": 5},
    },
}


DEEP = ("glm4v", "glm4v_moe", "llava_onevision", "llava_pixtral", "minicpmv_2_6", "minicpmv_4_5", "qwen3_vl_moe")
FAMILY_PARAMS = ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.deep) for name in DEEP)]


@dataclass(frozen=True)
class Adapted:
    """A model with every adapter of CONFIGS; text: PEFT's text models, by adapter."""

    models: Models
    folder: Path
    text: Mapping[str, nn.Module]


@pytest.fixture(scope="module", params=FAMILY_PARAMS)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp("adapted")
    models = load_models(request.param, folder / "model")
    text: dict[str, nn.Module] = {}
    for seed, (name, config) in enumerate(CONFIGS.items()):
        if name == "whole":
            text[name] = write_adapter(models.reference, folder / name, seed, **config).model.language_model
        else:
            text[name] = write_adapter(models.reference.model.language_model, folder / name, seed, **config)
    load_adapters([AdapterFolder(name, folder / name) for name in CONFIGS], models.engine)
    return Adapted(models, folder, text)


def without_adapters(adapted: Adapted) -> LanguageModel:
    return load_language_model(Checkpoint(adapted.models.folder), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def bare(adapted: Adapted) -> LanguageModel:
    return without_adapters(adapted)


@pytest.fixture
def mine(adapted: Adapted, tmp_path: Path) -> AdapterFolder:
    return AdapterFolder("mine", shutil.copytree(adapted.folder / "plain", tmp_path / "mine"))


def configure(mine: AdapterFolder, **config: Any) -> None:
    path = mine.path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def rewrite(mine: AdapterFolder, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(mine.path / "adapter_model.safetensors")
    change(weights)
    save_file(weights, mine.path / "adapter_model.safetensors")


# --- what adapters compute ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("joined", [False, True], ids=["", "layers are joined as on CUDA"])
def test_adapters_compute_what_peft_computes(adapted: Adapted, joined: bool) -> None:
    models = adapted.models
    if joined:
        with (
            patch.object(packed_linear, "JOINING_DEVICES", ("cpu",)),
            patch.object(packed_linear, "_can_pack", lambda _: False),
            layers_by_flash_infer(),
        ):
            models = replace(models, engine=without_adapters(adapted))
        assert any(isinstance(each, packed_linear.JoinedLinear) for each in models.engine.text.modules())
        load_adapters([AdapterFolder(name, adapted.folder / name) for name in CONFIGS], models.engine)
    video = random_item(models.family, (3, 2, 3), Fraction(1), rate=0.5)
    questions = [Question((Text((20, 21, 22)), video, Text((30, 31))), 6, adapter=name) for name in (*CONFIGS, None)]
    engine = TinyEngine(models.engine)
    asked = answer(engine, questions)
    assert_law(models, engine, questions, asked, adapted=adapted.text)
    with_tower = {"whole"} if models.family.model_type != "minicpmv" else set()  # whose reference has no tower
    assert {name for name in CONFIGS if models.engine.adapters.find(name).in_tower} == with_tower
    first = [engine.runner.logits[each.request.id][0].log_softmax(dim=-1) for each in asked]
    for one, other in combinations(first, 2):
        assert float((one - other).abs().max()) > 0.01, "adapters that change nothing prove nothing"


def test_an_adapter_of_the_published_minicpm_is_found_by_its_names(tmp_path: Path) -> None:
    models = load_models("minicpmv_2_6", tmp_path)
    published = nn.Module()
    published.llm = nn.Module()
    published.llm.model = models.reference.model.language_model
    text = write_adapter(
        published, tmp_path / "adapter", r=3, target_modules=r"llm\..*layers\.\d+\.self_attn\.(q_proj|v_proj)"
    ).llm.model
    load_adapters([AdapterFolder("mine", tmp_path / "adapter")], models.engine)
    asking = Question((Text((20, 21, 22, 23)),), 6, adapter="mine")
    engine = TinyEngine(models.engine)
    assert_law(models, engine, [asking], answer(engine, [asking]), adapted={"mine": text})


@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_neighbours_with_other_adapters_or_none_change_nothing(adapted: Adapted, data: st.DataObject) -> None:
    named = st.sampled_from((None, *CONFIGS))
    asking = data.draw(question(adapted.models.family))
    others = data.draw(st.lists(question(adapted.models.family), min_size=1, max_size=3))
    questions = [replace(each, adapter=data.draw(named)) for each in (asking, *others, asking)]
    questions.append(replace(asking, adapter=data.draw(named), answers=data.draw(st.integers(1, 2))))
    model = adapted.models.engine
    folder = write_head(adapted.models.folder / "head", SPECFORGE, model.hidden_size, model.vocab_size)
    head = load_draft_head(Checkpoint(folder), model) if data.draw(st.booleans()) else None
    engine = TinyEngine(
        replace(model, draft=head),
        blocks=max(each.most_blocks for each in questions) + data.draw(st.sampled_from((0, 4, 64))),
        max_num_batched_tokens=data.draw(st.sampled_from((3, 8, 64, 512))),
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_draft_tokens=data.draw(st.sampled_from((0, 3))),
    )
    asked = answer(engine, questions, data.draw(st.lists(st.integers(0, 8), max_size=5)))
    assert_law(adapted.models, engine, questions, asked, adapted=adapted.text)


def test_steps_with_adapters_are_not_replayed_as_graphs(adapted: Adapted) -> None:
    capture, engine = Recorder(), use_paged(TinyEngine(adapted.models.engine))
    engine.runner.capture_decoding(4, 256, capture)
    asking = Question((Text(tuple(range(20, 40))),), 9)
    questions = [replace(asking, adapter="plain", new_tokens=5), asking]
    asked = answer(engine, questions)
    # Of the longer answer eight tokens are decoded, four of them beside the other's.
    assert capture.replayed == [1] * 4
    assert_law(adapted.models, engine, questions, asked, adapted=adapted.text)


def test_adapters_have_one_digest_only_if_config_and_weights_are_equal(adapted: Adapted, mine: AdapterFolder) -> None:
    """The prefix cache tells adapters apart by their digests."""

    def digest() -> bytes:
        model = without_adapters(adapted)
        load_adapters([mine], model)
        return model.adapters.find("mine").digest

    plain = digest()
    assert plain == adapted.models.engine.adapters.find("plain").digest
    configure(mine, lora_alpha=8)
    louder = digest()
    rewrite(mine, lambda weights: next(iter(weights.values())).view(-1)[:1].add_(1e-6))
    assert len({plain, louder, digest()}) == 3


# --- what is refused at startup -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, r"peft_type = 'IA3'"),
        ({"use_dora": True}, r"use_dora = True is not supported"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights = 'pissa' is not supported"),
        ({"use_next_year": 0.5}, r"use_next_year = 0.5 is not known to PEFT \d"),
        ({"r": 0}, r"r = 0 is not supported"),
        ({"lora_alpha": float("nan")}, r"lora_alpha = nan is not supported"),
        ({"lora_alpha": 1e300}, r"weights of .*_proj, scaled by .*, are not finite"),
        ({"alpha_pattern": {"*": 8}}, r".*\(\*\).* is not a regular expression"),
        ({"target_modules": "a{99999999999}"}, r"the repetition number is too large"),
        ({"r": 4}, r"q_proj.lora_A must have shape \[4, (\d+)\] .*, got \[3, \1\]"),
        ({"target_modules": None}, r"target_modules = None is empty"),
        ({"target_modules": ["q_proj"]}, r"holds weights of .*v_proj, which target_modules = \['q_proj'\] does not"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, r"lacks weights of .*o_proj, which .* targets"),
    ],
)
def test_a_config_that_is_not_implemented_is_refused(
    bare: LanguageModel, mine: AdapterFolder, config: dict[str, Any], message: str
) -> None:
    configure(mine, **config)
    with pytest.raises(StartupError, match=rf"--adapters mine={mine.path}: .*{message}"):
        load_adapters([mine], bare)


@pytest.mark.parametrize(
    ("layer", "value", "message"),
    [
        ("lm_head", 0, "only linear layers of the language model's blocks"),
        ("layers.9.self_attn.q_proj", 0, "only linear layers of the language model's blocks"),
        ("layers.0.self_attn.k_proj", 0, "lora_A of layers.0.self_attn.k_proj but not its counterpart"),
        ("model.layers.0.self_attn.k_proj", 0, r"got the prefixes \['', 'model.'\]"),
        ("layers.1.self_attn.v_proj", float("nan"), "weights of layers.1.self_attn.v_proj, .*, are not finite"),
    ],
)
def test_weights_that_cannot_be_added_are_refused(
    bare: LanguageModel, mine: AdapterFolder, layer: str, value: float, message: str
) -> None:
    down = torch.full((3, bare.hidden_size), value)
    rewrite(mine, lambda weights: weights.update({f"base_model.model.{layer}.lora_A.weight": down}))
    with pytest.raises(StartupError, match=message):
        load_adapters([mine], bare)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_config.json", None, "the folder has no adapter_config.json"),
        ("adapter_config.json", b"[]", "is not a JSON object with a peft_type"),
        ("adapter_config.json", b"[" * 100_000, "--adapters mine=.*maximum recursion depth exceeded"),
        ("adapter_model.safetensors", None, "has no adapter_model.safetensors; other formats are not supported"),
        ("adapter_model.safetensors", b"not weights", "cannot be read"),
    ],
)
def test_a_missing_or_broken_file_is_refused_and_nothing_is_unpickled(
    bare: LanguageModel, mine: AdapterFolder, name: str, content: bytes | None, message: str
) -> None:
    torch.save(load_file(mine.path / "adapter_model.safetensors"), mine.path / "adapter_model.bin")
    (mine.path / name).unlink()
    if content is not None:
        (mine.path / name).write_bytes(content)
    with pytest.raises(StartupError, match=message):
        load_adapters([mine], bare)


def test_without_peft_adapters_are_refused_with_the_package_to_install(
    bare: LanguageModel, mine: AdapterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    load_adapters([], bare)
    with pytest.raises(StartupError, match=r"pip install 'gridsieve\[lora\]'"):
        load_adapters([mine], bare)


def test_ranks_that_read_different_adapter_files_refuse_to_start(
    adapted: Adapted, mine: AdapterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gridsieve.services.generation.startup.adapters._of_rank", lambda addition, *_: addition)
    group: Any = SimpleNamespace(agree=lambda _: False)
    model = without_adapters(adapted)
    with pytest.raises(StartupError, match="--adapters: the ranks have read different files"):
        load_adapters([mine], model, group)
