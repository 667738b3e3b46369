"""Products in fp8 are those of the formula, and a checkpoint stored in fp8 is computed by them where there is a kernel.

The kernel itself needs a card: here torch's meta device checks what it is called with, and the formula replaces it.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding, Qwen2_5_VLTextModel

from demo.checkpoint import TINY, write_checkpoint
from gridsieve.common.adapter_folder import AdapterFolder
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.generation.loading import fp8, load_language_model
from gridsieve.services.generation.loading.text_model import make_text
from gridsieve.services.generation.model.fp8_linear import (
    Fp8Linear,
    check_product,
    dequantised,
    dequantising,
    find_product,
    product_by_formula,
    scaled_product,
)
from gridsieve.services.generation.parallel.group import WorkerRanks
from gridsieve.services.generation.startup.adapters import load_adapters
from tests.adapters import write_adapter
from tests.families import FAMILIES
from tests.generation.checkpoints import Twins, changed, fp8_config, fp8_twins, load
from tests.law import Question, answer, assert_law
from tests.oracle import Text
from tests.parallel_rank import assert_law_on_two_ranks
from tests.tiny import TinyEngine, random_item

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn
BLOCK = 128
SHAPE = replace(
    TINY, hidden=256, heads=8, kv_heads=4, intermediate=384, mrope_section=(4, 6, 6), layers=2, init_range=0.05
)
# Of log-probabilities from the dequantised model; 0.25 was measured on twelve prompts. Their standard deviation over
# the vocabulary is 0.8, and those of the next token of the answer differ by more than 2.
BOUND = 0.4
PREFIX = FAMILIES["qwen2_5_vl"].text_prefix


def by_groups(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """rows [M, K], weight e4m3 [N, K], scales [N / 128, K / 128]: the formula, a group of channels after another."""
    found = torch.zeros(len(rows), len(weight))
    for group in range(rows.shape[1] // BLOCK):
        columns = range(BLOCK * group, BLOCK * (group + 1))
        own = rows[:, columns]
        least = torch.full((len(rows),), 1e-10)
        scale = torch.maximum(own.abs().amax(1).float(), least) / 448
        rounded = (own / scale[:, None]).to(FP8).double()
        for block in range(len(weight) // BLOCK):
            outputs = slice(BLOCK * block, BLOCK * (block + 1))
            exact = rounded @ weight[outputs, columns].double().T
            found[:, outputs] += exact.float() * (scale * scales[block, group])[:, None]
    return found.to(rows.dtype)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("fp8")
    return fp8_twins("qwen2_5_vl", write_checkpoint(folder / "written", SHAPE, 1), folder, BLOCK)


@pytest.fixture
def with_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula instead of a card's kernel."""
    monkeypatch.setattr(fp8, "find_product", lambda sizes, like: product_by_formula)


def random_layer(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    return torch.randn(outputs, inputs).to(FP8), torch.randn(outputs // BLOCK, inputs // BLOCK)


def test_every_value_is_dequantised_exactly() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(FP8)
    values = values[~values.float().isnan()].view(2, 127)
    assert torch.equal(dequantised(values, torch.full((1, 1), 3.0), [128, 128]), values.float() * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_computes_the_formula_to_the_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer = Fp8Linear(nn.Linear(3 * BLOCK, 2 * BLOCK, dtype=dtype), product_by_formula)
    layer.weight.data, layer.get_parameter("weight_scale_inv").data = random_layer(2 * BLOCK, 3 * BLOCK)
    rows = torch.randn(2, 3, 3 * BLOCK).to(dtype)
    rows[0, 1, BLOCK : 2 * BLOCK] = 0  # no scale divides by zero
    rows[1, 2] *= 1e5  # beyond e4m3 without a scale
    scales = layer.get_parameter("weight_scale_inv")
    expected = by_groups(rows.flatten(0, 1), layer.weight, scales).view(2, 3, -1) + layer.bias
    assert torch.equal(layer(rows), expected)


@pytest.mark.parametrize("count", [1, 16, 19])
@pytest.mark.parametrize("sizes", [(128, 128), (256, 640), (384, 512)])
def test_the_kernel_is_called_as_torch_requires(
    sizes: tuple[int, int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    real = F.scaled_mm

    def checked(
        values: Tensor, weight: Tensor, scale: Tensor, how: Any, scales: Tensor, block: Any, **named: Any
    ) -> Tensor:
        on_meta = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
            for each in (values, weight, scale, scales)
        ]
        real(on_meta[0], on_meta[1], on_meta[2], how, on_meta[3], block, **named)  # raises for other layouts
        assert len(values) % 16 == 0
        groups = weight.shape[0] // BLOCK
        by_row = values.float() * scale.repeat_interleave(BLOCK, 1)
        by_block = weight.float() * scales[:groups].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return (by_row @ by_block).to(named["output_dtype"])

    monkeypatch.setattr(F, "scaled_mm", checked)
    rows, (weight, scales) = torch.randn(count, sizes[1]), random_layer(*sizes)
    expected = by_groups(rows, weight, scales)
    torch.testing.assert_close(scaled_product(rows, weight, scales), expected, atol=1e-3, rtol=1e-5)


def test_a_wrong_kernel_is_not_used_and_the_cpu_has_none() -> None:
    sizes, like = [(256, 384)], torch.zeros((), dtype=torch.bfloat16)
    check_product(product_by_formula, sizes, like)
    with pytest.raises(AssertionError, match=r"256 × 384 differs by 0\.0"):
        check_product(lambda rows, weight, scales: 1.05 * product_by_formula(rows, weight, scales), sizes, like)
    with pytest.raises(AssertionError, match="differs by"):
        check_product(lambda rows, weight, scales: product_by_formula(rows, weight, scales.roll(1, 1)), sizes, like)
    assert find_product(sizes, like) is None


class Reference(nn.Module):
    """A linear layer of the reference, by the formula."""

    def __init__(self, linear: nn.Linear, weight: Tensor, scales: Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scaled, self.bias = (weight, scales), linear.bias

    def forward(self, rows: Tensor) -> Tensor:
        product = by_groups(rows.flatten(0, -2), *self.scaled).view(*rows.shape[:-1], -1)
        return product if self.bias is None else product + self.bias


def in_formula(text: Any, weights: dict[str, Tensor]) -> Any:
    """A text model, PEFT's too, whose layers in fp8 are computed by the formula.

    In float64: the last bit of a float32 would now and then round an activation to its other neighbour in fp8.
    """
    text = deepcopy(text).double()
    for name, layer in list(text.named_modules()):
        stored = f"{PREFIX}{name.removesuffix('.base_layer')}.weight"  # PEFT's name of the layer that it adds to
        if type(layer) is nn.Linear and f"{stored}_scale_inv" in weights:
            text.set_submodule(name, Reference(layer, weights[stored], weights[f"{stored}_scale_inv"]))
    return text


def test_the_law_holds_with_products_in_fp8_with_and_without_adapters(
    stored: Twins, with_kernel: None, tmp_path: Path
) -> None:
    models = stored.models
    plain = models.reference.model.language_model
    adapted = write_adapter(plain, tmp_path / "lora", r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"])
    model = load(stored.quantised, torch.float64)
    kept = {name: each for name, each in model.text.named_modules() if isinstance(each, Fp8Linear)}
    assert len(kept) == 7 * SHAPE.layers
    assert all(each.weight.dtype == FP8 for each in kept.values())
    load_adapters([AdapterFolder("lora", tmp_path / "lora")], model)
    engine = TinyEngine(model, max_num_batched_tokens=7)
    video = random_item(models.family, (3, 2, 2), Fraction(1), rate=0.5)
    asking = Question((Text(tuple(range(20, 33))),), 6)
    questions = [asking, replace(asking, adapter="lora"), Question((Text((20, 21)), video, Text((22,))), 4)]
    asked = answer(engine, questions)
    reference = deepcopy(models.reference).double()
    reference.model.language_model = in_formula(plain, stored.weights)
    assert_law(
        replace(models, reference=reference),
        engine,
        questions,
        asked,
        adapted={"lora": in_formula(adapted, stored.weights)},
    )
    assert_law(models, engine, questions[::2], asked[::2], BOUND, 2 * BOUND)


def test_layers_of_two_ranks_stay_in_fp8_with_the_scales_of_their_blocks(
    workers: WorkerRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On rank 0, with a dequantised product in the place of the card's. Rank 1 has none."""
    monkeypatch.setattr(fp8, "find_product", lambda sizes, like: dequantising([BLOCK, BLOCK]))
    shape = replace(SHAPE, hidden=512, heads=16, kv_heads=8, intermediate=512)
    twins = fp8_twins("qwen2_5_vl", write_checkpoint(tmp_path / "written", shape, 1), tmp_path, BLOCK)
    half = assert_law_on_two_ranks(twins.models, twins.quantised, workers, [Question((Text(tuple(range(20, 33))),), 6)])
    kept = {name: each.weight.shape for name, each in half.text.named_modules() if isinstance(each, Fp8Linear)}
    assert len(kept) == 7 * SHAPE.layers
    assert kept["layers.1.self_attn.v_proj"] == (128, 512)
    assert kept["layers.1.self_attn.o_proj"] == (512, 256)


@pytest.mark.parametrize("kernel", [False, True], ids=["dequantised", "in fp8"])
def test_weights_rounded_to_fp8_are_those_of_a_checkpoint_that_is_stored_so(
    stored: Twins, kernel: bool, request: pytest.FixtureRequest
) -> None:
    if kernel:
        request.getfixturevalue("with_kernel")
    model = load_language_model(Checkpoint(stored.plain.parent / "written"), torch.float32, CPU, quantization="fp8")
    engine = TinyEngine(model)
    asking = Question((Text(tuple(range(20, 33))),), 6)
    assert_law(stored.models, engine, [asking], answer(engine, [asking]), *((BOUND, 2 * BOUND) if kernel else ()))
    for name, each in model.text.named_modules():
        if isinstance(each, Fp8Linear):
            assert torch.equal(each.weight, stored.weights[f"{PREFIX}{name}.weight"])
            assert torch.equal(each.weight_scale_inv, stored.weights[f"{PREFIX}{name}.weight_scale_inv"])
    assert sum(isinstance(each, Fp8Linear) for each in model.text.modules()) == 7 * SHAPE.layers * kernel


def test_rounding_to_fp8_is_refused_by_name_where_it_is_not_supported(stored: Twins, tmp_path: Path) -> None:
    small, group = write_checkpoint(tmp_path / "small", TINY, 1), SimpleNamespace(ranks=2, rank=0)
    for folder, ranks, message in (
        (small, None, "no linear layer has multiples of 128 inputs and outputs"),
        (stored.quantised, None, "the checkpoint is quantised already"),
        (stored.plain, group, "--tensor-parallel must be 1, got 2"),
    ):
        with pytest.raises(StartupError, match=f"--quantization fp8: {message}"):
            load_language_model(Checkpoint(folder), torch.float32, CPU, cast(Any, ranks), quantization="fp8")


def test_unquantised_weights_have_the_dtype_of_the_settings(stored: Twins, with_kernel: None) -> None:
    text = load(stored.quantised, torch.bfloat16).text
    dtypes = {name.rpartition(".")[2]: set[torch.dtype]() for name, _ in text.named_parameters()}
    for name, each in text.named_parameters():
        dtypes[name.rpartition(".")[2]].add(each.dtype)
    assert dtypes == {"weight": {torch.bfloat16, FP8}, "bias": {torch.bfloat16}, "weight_scale_inv": {torch.float32}}


def test_missing_and_unknown_weights_are_refused_by_name(stored: Twins, with_kernel: None, tmp_path: Path) -> None:
    scales = f"{PREFIX}layers.1.mlp.up_proj.weight_scale_inv"
    lacking = changed(stored.quantised, tmp_path / "lacking", lambda weights: weights.pop(scales))
    with pytest.raises(StartupError, match=r"missing weights \['model.*layers.1.mlp.up_proj.weight_scale_inv'\]"):
        load(lacking, torch.float32)
    name = f"{PREFIX}extra.weight"
    extra = changed(stored.quantised, tmp_path / "extra", lambda weights: weights.update({name: torch.ones(1)}))
    with pytest.raises(StartupError, match=r"unknown weights \['model\..*extra.weight'\]"):
        load(extra, torch.float32)


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        ({"weight_block_size": [64, 64]}, {}),
        ({"activation_scheme": "static"}, {}),
        ({"scale_fmt": "ue8m0"}, {}),
        (
            {},
            {
                f"{PREFIX}layers.0.mlp.experts.down_proj": torch.zeros(2, 128, 128).to(FP8),
                f"{PREFIX}layers.0.mlp.experts.down_proj_scale_inv": torch.ones(2, 1, 1),
            },
        ),
        ({}, {f"{PREFIX}layers.0.mlp.up_proj.weight": torch.zeros(384, 256)}),  # with scales, but not in fp8
        ({}, {"lm_head.weight": torch.zeros(328, 256).to(FP8), "lm_head.weight_scale_inv": torch.ones(3, 2)}),
    ],
)
def test_other_formats_and_layers_are_left_to_be_dequantised(
    stored: Twins, with_kernel: None, tmp_path: Path, config: dict[str, Any], weights: dict[str, Tensor]
) -> None:
    config = fp8_config(BLOCK) | config
    other = changed(stored.quantised, tmp_path / "other", lambda held: held.update(weights), quantization_config=config)
    sizes = Qwen2_5_VLConfig.from_pretrained(other).text_config
    text = make_text(Qwen2_5_VLTextModel, Qwen2_5_VLRotaryEmbedding, sizes, CPU)
    assert fp8.keep_fp8(Checkpoint(other), text, PREFIX, torch.float32, CPU) == {}
    assert not any(isinstance(each, Fp8Linear) for each in text.modules())
