"""The language model computes what transformers computes, from a checkpoint that must be complete."""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from demo.checkpoint import TINY, write_checkpoint
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.compute import packed_linear
from gridsieve.services.compute.packed_linear import JoinedLinear, pack_linears
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.model import norms
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.sampling.sampler import SamplingParams
from tests import law
from tests.families import FAMILIES, cosmos3_edge, load_reference, write_qwen3_vl_moe
from tests.generation.checkpoints import changed, tied, with_swapped_experts
from tests.generation.paged_kernels import layers_by_flash_infer, use_paged
from tests.generation.recorder import Recorder
from tests.oracle import Text
from tests.tiny import TinyEngine, load_models, random_item

CPU = torch.device("cpu")
PROMPT = Text((10, 11, 12, 13, 14))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LanguageModel:
    return load_language_model(Checkpoint(folder), dtype, CPU)


def answer_of_transformers(family: str, folder: Path) -> list[int]:
    prompt = torch.tensor([PROMPT.ids])
    generated = load_reference(family, folder).generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, eos_token_id=None, do_sample=False
    )
    ids: list[int] = generated[0, len(PROMPT.ids) :].tolist()
    return ids


def answer(model: LanguageModel) -> list[int]:
    engine = TinyEngine(model)
    asked = engine.ask("a", [PROMPT], SamplingParams(8))
    engine.drain()
    return asked.answer


def test_a_tied_output_layer_answers_as_in_transformers(family: str, family_checkpoint: Path, tmp_path: Path) -> None:
    if not FAMILIES[family].model._tied_weights_keys:
        pytest.skip("its class in transformers ties no weights")
    folder = tied(family_checkpoint, tmp_path / "tied")
    assert answer(load(folder)) == answer_of_transformers(family, folder)


# What transformers writes, and how it may be called otherwise: as published, or if it is asked not to keep those names.
SPELLINGS = [
    ("qwen2_5_vl", {"model.": "model.language_model.", "visual.": "model.visual."}),
    ("llava", {"vision_tower.": "vision_tower.vision_model."}),
    (
        "llava",
        {
            "language_model.model.": "model.language_model.",
            "language_model.lm_head.": "lm_head.",
            "vision_tower.": "model.vision_tower.",
            "multi_modal_projector.": "model.multi_modal_projector.",
        },
    ),
]


@pytest.mark.parametrize(("family", "names"), SPELLINGS)
def test_both_spellings_of_key_names_load(
    family: str, names: dict[str, str], checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    def rename(weights: dict[str, Tensor]) -> None:
        for name in list(weights):
            old, new = next((each for each in names.items() if name.startswith(each[0])), ("", ""))
            weights[new + name.removeprefix(old)] = weights.pop(name)

    renamed = changed(checkpoints(family), tmp_path / "renamed", rename)
    assert answer(load(renamed)) == answer(load(checkpoints(family)))
    picture = torch.arange(56 * 56 * 3).remainder(251).to(torch.uint8).view(1, 56, 56, 3)
    folders = (renamed, checkpoints(family))
    towers = [load_tower(Checkpoint(folder), "float32", torch.device("cpu")) for folder in folders]
    frames = picture.expand(towers[0].patches.temporal_patch, -1, -1, -1)
    assert torch.equal(*(tower.encode([frames])[0] for tower in towers))


@pytest.mark.parametrize("layout", [cosmos3_edge.published, cosmos3_edge.saved])
def test_cosmos3_edge_loads_as_published_and_as_transformers_saves_it(
    layout: Callable[[Path], Path], checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    own = checkpoints("cosmos3_edge")
    folder = layout(shutil.copytree(own, tmp_path / "copy"))
    assert answer(load(folder)) == answer(load(own)) == answer_of_transformers("cosmos3_edge", folder)
    towers = [load_tower(Checkpoint(each), "float32", CPU) for each in (folder, own)]
    picture = torch.arange(64 * 96 * 3).remainder(251).to(torch.uint8).view(1, 64, 96, 3)
    assert torch.equal(*(tower.encode([picture])[0] for tower in towers))


def test_of_a_model_that_also_speaks_the_part_that_reads_is_loaded(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    thinker = checkpoints("qwen3_omni_moe")

    def rename(weights: dict[str, Tensor]) -> None:
        for name in list(weights):
            weights[f"thinker.{name}"] = weights.pop(name)
        weights |= {f"{part}.model.norm.weight": torch.ones(3) for part in ("talker", "code2wav")}

    whole = changed(thinker, tmp_path / "whole", rename)
    config = {"model_type": "qwen3_omni_moe", "thinker_config": json.loads((thinker / "config.json").read_text())}
    (whole / "config.json").write_text(json.dumps(config))
    assert answer(load(whole)) == answer_of_transformers("qwen3_omni_moe", thinker)
    towers = [load_tower(Checkpoint(each), "float32", CPU) for each in (whole, thinker)]
    frames = torch.arange(2 * 64 * 96 * 3).remainder(251).to(torch.uint8).view(2, 64, 96, 3)
    assert torch.equal(*(tower.encode([frames])[0] for tower in towers))


# Of the two matrices of an expert the first is square at 32, the second at 64: those are taken as they are.
@pytest.mark.parametrize("moe_intermediate", [32, 64])
def test_experts_load_as_transformers_writes_them_and_with_swapped_axes_as_published(
    tmp_path: Path, moe_intermediate: int
) -> None:
    written = write_qwen3_vl_moe(tmp_path / "written", 1, moe_intermediate)
    for folder in (written, with_swapped_experts(written, tmp_path / "swapped")):
        assert answer(load(folder)) == answer_of_transformers("qwen3_vl_moe", folder)


@pytest.mark.parametrize("family", ["internvl_qwen3_moe", "glm4v_moe"])
def test_experts_load_one_by_one_as_published_beside_an_output_layer_that_the_config_does_not_tell_of(
    family: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of InternVL 3.5, whose config leaves out tie_word_embeddings: true, by the default of transformers' class."""
    folder = changed(checkpoints(family), tmp_path / "other", tie_word_embeddings=True)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = file.keys()
    assert f"{FAMILIES[family].text_prefix}layers.1.mlp.experts.3.up_proj.weight" in names
    assert answer(load(folder)) == answer_of_transformers(family, folder)


def test_layers_of_glm_4_5v_that_predict_further_tokens_are_not_read(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its published files have one after the last layer."""
    draft = {
        "model.language_model.layers.3.eh_proj.weight": torch.zeros(64, 128),
        "model.language_model.layers.3.mlp.experts.0.up_proj.weight": torch.zeros(48, 64),
    }
    own = checkpoints("glm4v_moe")
    drafts = {"num_nextn_predict_layers": 1}
    folder = changed(own, tmp_path / "other", lambda weights: weights.update(draft), drafts)
    assert answer(load(folder)) == answer(load(own))


def test_a_missing_expert_is_named(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    name = "language_model.model.layers.1.mlp.experts.2.up_proj.weight"
    folder = changed(checkpoints("internvl_qwen3_moe"), tmp_path / "other", lambda weights: weights.pop(name))
    with pytest.raises(StartupError, match=re.escape(f"missing weights ['{name}']")):
        load(folder)


def test_weights_that_differ_from_the_config_are_named(family: str, family_checkpoint: Path, tmp_path: Path) -> None:
    prefix = FAMILIES[family].text_prefix
    norm, query = f"{prefix}norm.weight", f"{prefix}layers.1.self_attn.q_proj.weight"
    first = "linear_attention" if family.startswith(("qwen3_5", "minicpmv4")) else "full_attention"
    two_layers: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": [first, "full_attention"]}
    if family.startswith("nemotron"):
        norm, query = f"{prefix}norm_f.weight", f"{prefix}layers.3.mixer.q_proj.weight"
        of_both = {"nemotron_h_omni": ["linear_attention", "mlp"], "nemotron_nano_vl": "M-"}[family]
        two_layers = {"layers_block_type" if isinstance(of_both, list) else "hybrid_override_pattern": of_both}
    faults: list[tuple[Callable[[dict[str, Tensor]], object], dict[str, Any], str]] = [
        (lambda weights: weights.pop(query), {}, f"missing weights ['{query}']"),
        (lambda weights: weights.pop(FAMILIES[family].lm_head), {}, "missing weights ['lm_head.weight']"),
        (
            lambda weights: weights.update({norm: torch.zeros(3)}),
            {},
            f"expects {norm} [{FAMILIES[family].hidden}], got [3]",
        ),
        (id, two_layers, f"unknown weights ['{prefix}layers.2"),
    ]
    for number, (weights, text_config, message) in enumerate(faults):
        broken = changed(family_checkpoint, tmp_path / str(number), weights, text_config)
        with pytest.raises(StartupError, match=re.escape(message)):
            load(broken)


def test_buffers_that_modules_compute_are_not_read_from_old_files(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    buffers = {
        "language_model.model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "language_model.model.rotary_emb.inv_freq": torch.ones(8),
        "vision_tower.vision_model.embeddings.position_ids": torch.arange(17)[None],
    }
    folder = changed(checkpoints("llava"), tmp_path / "old", lambda weights: weights.update(buffers))
    assert answer(load(folder)) == answer_of_transformers("llava", folder)
    load_tower(Checkpoint(folder), "float32", torch.device("cpu"))


def test_dynamic_frequencies_are_the_default_ones_as_long_as_positions_fit_into_the_context(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of InternVL 2.5 and 3, written as in their published files."""
    text_config = {
        "rope_parameters": None,
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic"},
        "rope_theta": 10000.0,
        "max_position_embeddings": len(PROMPT.ids) + 8,
    }
    folder = changed(checkpoints("internvl"), tmp_path / "other", text_config=text_config)
    assert load_reference("internvl", folder).config.text_config.rope_parameters["rope_type"] == "dynamic"
    model = load(folder)
    assert answer(model) == answer_of_transformers("internvl", folder)
    assert model.position_axes == 1  # so admission checks the whole prompt against the context
    assert model.text.rotary_emb.rope_type == "default"  # the class of `dynamic` waits for the device


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("qwen2_5_vl", {"text_config": {"use_sliding_window": True}}, "text_config.use_sliding_window: sliding window"),
        # Positions on three axes are not checked against the context.
        (
            "qwen2_5_vl",
            {"text_config": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}},
            "'dynamic' is not supported",
        ),
        (
            "qwen3_vl",
            {"text_config": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}},
            "'linear' is not supported",
        ),
        ("mistral3", {"text_config": {"sliding_window": 4096}}, "text_config.sliding_window: sliding window"),
        ("llava", {"vision_feature_select_strategy": "class"}, "'vision_feature_select_strategy' .* got class"),
        # Of one size of InternVL 3.5: its attention has sinks and sliding windows.
        ("internvl", {"text_config": {"model_type": "gpt_oss"}}, "'gpt_oss' is not supported, only llama, mistral"),
        ("internvl", {"text_config": {"model_type": "internlm2"}}, "text_config.model_type must be .* got 'internlm2'"),
        ("qwen2_5_vl", {"text_config": {"num_attention_heads": 0}}, "config.json: integer division or modulo by zero"),
    ],
)
def test_a_config_that_is_not_supported_is_a_startup_error(
    checkpoints: Callable[[str], Path], tmp_path: Path, name: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        load(changed(checkpoints(name), tmp_path / "other", **fields))


def test_bfloat16_runs_with_float32_logits(family: str, family_checkpoint: Path) -> None:
    """Beside weights that transformers keeps in float32: GLM-4.5V's choice of experts is ruined by rounding."""
    model = load(family_checkpoint, torch.bfloat16)
    kept = tuple(model.text._keep_in_fp32_modules_strict or ())  # a whole model lacks those of its text model
    for name, weight in model.text.state_dict().items():
        if "rotary" not in name and weight.is_floating_point():
            assert weight.dtype == (torch.float32 if name.endswith(kept) else torch.bfloat16), name
    engine = TinyEngine(model)
    engine.ask("a", [PROMPT], SamplingParams(2))
    engine.drain()
    assert engine.runner.logits["a"][0].dtype == torch.float32


class Other(torch.Tensor):
    pass


def other_forward(linear: nn.Linear) -> None:
    linear.forward = lambda states: states  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "change",
    [
        other_forward,
        lambda linear: linear.to(torch.float64),
        lambda linear: linear.__delattr__("weight"),
        lambda linear: setattr(linear, "weight", nn.Parameter(linear.weight.detach().as_subclass(Other))),
    ],
)
def test_quantised_and_unsupported_layers_are_not_packed(change: Callable[[nn.Linear], None]) -> None:
    linear = nn.Linear(8, 8).requires_grad_(False)
    change(linear)
    model = nn.Sequential(linear)
    pack_linears(model)
    assert model[0] is linear


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("tie", [False, True])
def test_the_checkpoint_is_not_kept_in_memory_beside_packed_weights(tmp_path: Path, tie: bool) -> None:
    folder = write_checkpoint(tmp_path / "model", replace(TINY, tie_word_embeddings=tie))
    model = load(folder)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert model.embed_tokens.weight.isfinite().all()


def test_few_weights_are_held_twice_while_layers_are_joined(tiny_checkpoint: Path) -> None:
    """In float64, so that weights are read one by one, as they are on CUDA, and not mapped with their file."""
    held: list[int] = []

    class Watched(packed_linear._Product):
        def __init__(self, linears: Sequence[nn.Linear]) -> None:
            super().__init__(linears)
            held.append(tensor_bytes())

    gc.freeze()  # what other tests left is not counted, and costs no time
    with (
        patch.object(packed_linear, "JOINING_DEVICES", ("cpu",)),
        patch.object(packed_linear, "_can_pack", lambda _: False),
        patch.object(packed_linear, "_Product", Watched),
    ):
        model = load(tiny_checkpoint, torch.float64)
    assert max(held) < 1.2 * tensor_bytes()
    assert model.dtype == torch.float64


def tensor_bytes() -> int:
    """Of all tensors that were made since `gc.freeze`."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and each.device == CPU]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "cosmos3_edge", "llava", "minicpmv_4_5", "mistral3"]
)
def test_the_law_holds_with_layers_joined_and_fused_as_they_are_on_cuda(family: str, tmp_path: Path) -> None:
    with (
        patch.object(packed_linear, "JOINING_DEVICES", ("cpu",)),
        patch.object(packed_linear, "_can_pack", lambda _: False),
        patch.object(norms, "FUSING_DEVICES", ("cpu",)),
        layers_by_flash_infer() as library,
    ):
        models = load_models(family, tmp_path)
    library.called.clear()
    forwards = list[int]()
    models.engine.text.register_forward_hook(lambda *_: forwards.append(1))
    modules = dict(models.engine.text.named_modules())
    kinds = {name.split(".")[-1]: type(each) for name, each in modules.items() if ".0." in name}
    gated = family != "cosmos3_edge"
    joined = ("q_proj", "k_proj", "v_proj", *(("gate_proj", "up_proj") if gated else ()))
    assert all(kinds[name] is JoinedLinear for name in joined)
    assert kinds["o_proj"] is nn.Linear
    assert all(type(each) is norms.FusedNorm for name, each in modules.items() if name.endswith("norm"))
    engine, capture = TinyEngine(models.engine, max_num_batched_tokens=9), Recorder()
    video = random_item(models.family, (4, 2, 3), Fraction(1), rate=0.5)
    questions = [law.Question((Text((20 + number, 21)), video, Text((30,))), 7 + number) for number in range(3)]
    assert use_paged(engine).runner.capture_decoding(4, 256, capture)
    law.assert_law(models, engine, questions, law.answer(engine, questions, arrivals=[0, 1, 3]))
    computed = models.engine.layers * len(forwards)
    assert library.called == {"rope": computed, **({"silu": computed} if gated else {})}


@pytest.mark.parametrize("name", ["apply_rope_with_cos_sin_cache", "silu_and_mul"])
def test_layers_are_not_fused_by_a_kernel_with_wrong_results(name: str, tiny_checkpoint: Path) -> None:
    with layers_by_flash_infer() as library:
        right = getattr(library, name)

        def wrong(*arrays: Tensor) -> Tensor | list[Tensor]:
            found = right(*arrays)
            return found + 0.1 if isinstance(found, Tensor) else [each.roll(1, dims=1) for each in found]

        setattr(library, name, wrong)
        text = load(tiny_checkpoint).text
    assert library.called
    assert {type(each) for each in text.modules()} == {type(each) for each in load(tiny_checkpoint).text.modules()}
