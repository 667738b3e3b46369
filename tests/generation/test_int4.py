"""Linear layers in 4 bits compute what their dequantised weights compute, in every layout, or are refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from demo.checkpoint import TINY, write_checkpoint
from framesieve.common.checkpoint import Checkpoint
from framesieve.common.contract.errors import StartupError
from framesieve.services.compute.int4_linear import (
    CpuLayout,
    CudaLayout,
    Int4Linear,
    Int4Matrix,
    Int4Weight,
    PlainLayout,
    check_layout,
    layout_of,
    rounded_to_nearest,
)
from framesieve.services.compute.packed_linear import JoinedLinear
from framesieve.services.generation.families import load_language_model
from framesieve.services.generation.model.language_model import LanguageModel
from framesieve.services.generation.parallel.group import WorkerRanks
from framesieve.services.generation.settings import AdapterFolder
from framesieve.services.generation.startup.adapter_files import load_adapters
from tests import parallel_rank
from tests.adapters import write_adapter
from tests.generation.checkpoints import Twins, changed, load
from tests.generation.int4 import LAYOUTS, PREFIX, SHAPE, int4_twins
from tests.law import Question, answer, assert_law
from tests.oracle import Text
from tests.tiny import TinyEngine, random_item

CPU = torch.device("cpu")
# Of log-probabilities in bfloat16 from the dequantised model in float32.
BFLOAT16 = 0.1


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_checkpoint(tmp_path_factory.mktemp("int4") / "written", SHAPE, 1)


@pytest.fixture(scope="module", params=LAYOUTS)
def twins(request: pytest.FixtureRequest, written: Path, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return int4_twins(request.param, written, tmp_path_factory.mktemp("twins"))


@pytest.fixture(scope="module")
def awq(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return int4_twins("awq", written, tmp_path_factory.mktemp("awq"))


def questions(twins: Twins) -> list[Question]:
    video = random_item(twins.models.family, (3, 2, 2), Fraction(1), rate=0.5)
    asking = Question((Text(tuple(range(20, 33))),), 6)
    return [asking, replace(asking, adapter="lora"), Question((Text((20, 21)), video, Text((22,))), 4)]


@pytest.mark.parametrize("count", [1, 4, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 128])
def test_a_product_is_that_of_the_formula(group: int, dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(1)
    values = torch.randint(0, 16, (192, 256), dtype=torch.uint8)
    zeros, scales = torch.randint(0, 16, (192, 256 // group)), torch.rand(192, 256 // group)
    of_column = torch.arange(256) // group
    dense = (values - zeros[:, of_column]) * scales[:, of_column]
    weight = Int4Weight(Int4Matrix(values, scales, -zeros * scales), dtype)
    assert isinstance(weight.layout, PlainLayout) == (dtype != torch.bfloat16 or not has_products())
    rows = torch.randn(2, count, 256).to(dtype)
    exact = rows.double() @ dense.double().T
    most = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert (weight.multiply(rows).double() - exact).abs().max() < most * exact.abs().max()


def has_products() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith(("AVX2", "AVX512"))


def test_a_layout_that_is_not_this_processors_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_products():
        pytest.skip("torch has no fast products in int4 on this processor")
    other = 64 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 32
    with pytest.raises(AssertionError, match="a product of 1 rows differs by"):
        check_layout(CpuLayout(other), CPU)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512" if other == 64 else "AVX2")
    assert isinstance(layout_of.__wrapped__(torch.bfloat16, CPU), PlainLayout)


def test_the_layout_of_cuda_is_read_as_its_products_read_it() -> None:
    """Thread t of 32 has of a tile of 8 × 16 the row t / 4 and the columns 2 · (t % 4) + 0, 1, 8 and 9; an int32 has
    those of two tiles, of which the second of each pair comes 16 bits later."""
    torch.manual_seed(1)
    rows, columns = 16, 256
    values = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    packed = torch.zeros(rows // 8, columns // 128, 32, 4, dtype=torch.int64)
    for tile in range(rows // 8):
        for column in range(columns):
            block, within = divmod(column, 128)
            pair, of_pair = divmod(within // 16, 2)
            half, place = divmod(column % 16, 8)
            for row in range(8):
                bits = 4 * (2 * of_pair + half) + 16 * (place % 2)
                packed[tile, block, 4 * row + place // 2, pair] |= int(values[8 * tile + row, column]) << bits
    int32 = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    scales = torch.stack((torch.ones(2, rows), torch.full((2, rows), 8.0)), -1)
    assert torch.equal(CudaLayout().dense(int32, scales, torch.empty(values.numel())), values.float())


def test_the_law_holds_in_every_published_layout_with_and_without_adapters(twins: Twins, tmp_path: Path) -> None:
    models = twins.models
    config = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"]}
    adapted = write_adapter(models.reference.model.language_model, tmp_path / "lora", **config)
    for dtype, bounds in ((torch.float32, ()), (torch.bfloat16, (BFLOAT16, 2 * BFLOAT16))):
        model = load(twins.quantised, dtype)
        layers = [each for each in model.text.modules() if isinstance(each, Int4Linear | JoinedLinear)]
        assert len(layers) == 7 * SHAPE.layers
        load_adapters([AdapterFolder("lora", tmp_path / "lora")], model)
        engine = TinyEngine(model, max_num_batched_tokens=7)
        asked = answer(engine, questions(twins))
        assert_law(models, engine, questions(twins), asked, *bounds, adapted={"lora": adapted})


def test_layers_with_the_same_inputs_are_joined(awq: Twins) -> None:
    model = load(awq.quantised, torch.bfloat16)
    kinds = {name.rpartition(".")[2]: type(each) for name, each in model.text.named_modules() if "_proj" in name}
    assert {name for name, kind in kinds.items() if kind is JoinedLinear} == {
        *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    }
    assert {kind for name, kind in kinds.items() if name in ("o_proj", "down_proj")} == {Int4Linear}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own code
def test_a_compiled_model_obeys_the_law(awq: Twins) -> None:
    engine = TinyEngine(load(awq.quantised, torch.bfloat16), max_num_batched_tokens=11)
    assert engine.runner.compile()
    asked = [each for each in questions(awq) if not each.adapter]
    assert_law(awq.models, engine, asked, answer(engine, asked), BFLOAT16, 2 * BFLOAT16)
