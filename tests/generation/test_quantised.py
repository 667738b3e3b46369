"""A quantised checkpoint computes what its dequantised weights compute, or is refused with a reason."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gridsieve.common.adapter_folder import AdapterFolder
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.parallel.group import WorkerRanks
from gridsieve.services.generation.startup.adapters import load_adapters
from tests.adapters import write_adapter
from tests.families import FAMILIES
from tests.generation.checkpoints import Twins, changed, fp8_config, fp8_twins, load
from tests.law import Question, answer, assert_law
from tests.oracle import Text
from tests.parallel_rank import assert_law_on_two_ranks
from tests.tiny import TinyEngine, random_item

CPU = torch.device("cpu")
# Of the names of weights of which each of two ranks has half.
PARTS = ("q_proj.weight", "mlp.down_proj", ".experts.")
ASKING = Question((Text(tuple(range(20, 33))),), 8)


@pytest.fixture(
    scope="module",
    # Experts of a mixture are stored stacked, or one by one.
    params=["qwen2_5_vl", "qwen3_vl_moe", "glm4v_moe", pytest.param("qwen3_vl", marks=pytest.mark.deep)],
)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("quantised")
    return fp8_twins(request.param, FAMILIES[request.param].write(folder / "written", 1), folder, block=40)


def test_answers_are_those_of_the_dequantised_weights_with_and_without_adapters(twins: Twins, tmp_path: Path) -> None:
    models = twins.models
    config = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "o_proj"]}
    with_adapter = write_adapter(models.reference.model.language_model, tmp_path / "lora", **config)
    model = load(twins.quantised)
    load_adapters([AdapterFolder("lora", tmp_path / "lora")], model)
    engine = TinyEngine(model)
    video = random_item(models.family, (3, 2, 2), Fraction(1), rate=0.5)
    questions = [ASKING, replace(ASKING, adapter="lora"), Question((Text((20, 21)), video, Text((22,))), 4)]
    assert_law(models, engine, questions, answer(engine, questions), adapted={"lora": with_adapter})


def test_the_vision_tower_of_a_quantised_checkpoint_is_unchanged(twins: Twins) -> None:
    frames = torch.randint(0, 256, (2, 128, 128, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    towers = [load_tower(Checkpoint(folder), "auto", CPU) for folder in (twins.quantised, twins.plain)]
    side = 2 * towers[0].patches.token_px
    (one,), (other,) = (tower.encode([frames[:, :side, :side]]) for tower in towers)
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "mystery"}, r"quant_method 'mystery' is not supported by transformers 5\.\d+"),
        ({"bits": 4}, r"quant_method None is not supported by"),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, r"'bitsandbytes', .*pip install -U bitsandbytes"),
    ],
)
def test_an_unknown_method_or_a_missing_package_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        load(changed(tiny_checkpoint, tmp_path / "other", quantization_config=settings))


@pytest.mark.parametrize("family", ["minicpmv_4_5", "nemotron_h_omni", "nemotron_nano_vl"])
def test_families_whose_whole_model_is_not_loaded_are_refused_by_name(family: str, tmp_path: Path) -> None:
    written = FAMILIES[family].write(tmp_path / "written", 1)
    model_type = FAMILIES[family].model_type or family
    with pytest.raises(StartupError, match=f"quantised checkpoints of {model_type} are not supported, except in 4"):
        load(changed(written, tmp_path / "other", quantization_config={"quant_method": "torchao"}))


def test_scales_of_activations_are_not_read_with_dequantised_weights(twins: Twins, tmp_path: Path) -> None:
    """compressed-tensors' "static" and FineGrainedFP8's; k_scale is of a cache in fp8."""
    numbers = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    compressed = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "float-quantized",
        "ignore": ["re:.*lm_head", "re:.*visual.*"],
        "config_groups": {
            "linear": {
                "targets": ["Linear"],
                "weights": {**numbers, "strategy": "block", "block_structure": [40, 40]},
                "input_activations": {**numbers, "strategy": "tensor"},
            }
        },
    }
    static = fp8_config(40) | {"activation_scheme": "static"}
    kinds = [("_scale_inv", "activation_scale", static)]
    if not twins.models.family.text_prefix.endswith("language_model."):  # the others have experts
        kinds.append(("_scale", "input_scale", compressed))
    for number, (of_weight, of_rows, config) in enumerate(kinds):

        def rename(weights: dict[str, Tensor], of_weight: str = of_weight, of_rows: str = of_rows) -> None:
            for name in [each for each in weights if each.endswith("_proj.weight_scale_inv")]:
                layer = name.removesuffix("weight_scale_inv")
                weights[f"{layer}weight{of_weight}"] = weights.pop(name)
                weights[f"{layer}{of_rows}"] = torch.ones(1)
            weights[f"{twins.models.family.text_prefix}layers.0.self_attn.k_scale"] = torch.ones(1)

        folder = changed(twins.quantised, tmp_path / str(number), rename, quantization_config=config)
        engine = TinyEngine(load(folder))
        assert_law(twins.models, engine, [ASKING], answer(engine, [ASKING]))


def test_missing_and_unknown_weights_are_refused_by_name(twins: Twins, tmp_path: Path) -> None:
    norm = f"{twins.models.family.text_prefix}norm.weight"
    lacking = changed(twins.quantised, tmp_path / "lacking", lambda weights: weights.pop(norm))
    with pytest.raises(StartupError, match=rf"missing weights \['{norm}'\]"):
        load(lacking)
    name = f"{twins.models.family.text_prefix}extra.weight"
    extra = changed(twins.quantised, tmp_path / "extra", lambda weights: weights.update({name: torch.ones(1)}))
    with pytest.raises(StartupError, match=r"unknown weights \['model\..*extra.weight'\]"):
        load(extra)


def test_two_ranks_have_half_of_the_weights_each_and_answer_as_one(twins: Twins, workers: WorkerRanks) -> None:
    video = random_item(twins.models.family, (3, 2, 2), Fraction(1), rate=0.5)
    asked = [ASKING, Question((Text((20, 21)), video, Text((22,))), 4)]
    half = assert_law_on_two_ranks(twins.models, twins.quantised, workers, asked)
    weights = {name: each for name, each in twins.weights.items() if name.startswith(twins.models.family.text_prefix)}
    held, whole = (
        {part: sum(each.numel() for name, each in every if part in name and "scale" not in name) for part in PARTS}
        for every in (list(half.text.named_parameters()), weights.items())
    )
    assert {part: 2 * size for part, size in held.items()} == whole


def test_two_ranks_are_refused_where_transformers_dequantises(tiny_checkpoint: Path, tmp_path: Path) -> None:
    group: Any = SimpleNamespace(ranks=2, rank=0)
    folder = changed(tiny_checkpoint, tmp_path / "other", quantization_config={"quant_method": "torchao"})
    with pytest.raises(StartupError, match="--tensor-parallel 2: checkpoints that transformers dequantises support on"):
        load_language_model(Checkpoint(folder), torch.float32, CPU, group)
