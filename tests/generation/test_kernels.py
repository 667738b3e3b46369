"""Kernels of Triton compute what torch's operators compute, as Triton's interpreter runs them on the CPU.

Triton is not among the packages of a CPU's environment, and takes 700 MB:

    pip install triton
    TRITON_INTERPRET=1 python -m pytest tests/generation/test_kernels.py

The interpreter multiplies no bfloat16 and rounds to it otherwise, so rows are float32.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gridsieve.services.compute.int4_linear import CudaLayout, Int4Matrix, Int4Weight
from gridsieve.services.generation.model.delta_net import GatedDeltaRule
from gridsieve.services.generation.model.mamba2 import SelectiveScan
from gridsieve.services.generation.model.recurrent_layer import TriedKernels
from gridsieve.services.generation.sampling.sampler import SamplingParams
from tests.generation.int4 import packed_for_cuda
from tests.law import Question, assert_law
from tests.oracle import Text
from tests.tiny import TinyEngine, load_models

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="Triton is not installed, or TRITON_INTERPRET=1 is not set",
)


def kernels(name: str) -> Any:
    return importlib.import_module(f"gridsieve.services.{name}")


class Layout(CudaLayout):
    """Packed without torch's operator, which is CUDA's."""

    def pack(self, values: Tensor) -> Tensor:
        return packed_for_cuda(values)


# A tile's rows in part and in several tiles; more rows than a product is for, whose weights are dequantised.
@pytest.mark.parametrize("count", [65, 130, 1025])
@pytest.mark.parametrize(
    ("outputs", "inputs", "group"), [(192, 256, 32), (64, 384, 64), (192, 384, 128), (64, 512, 256)]
)
def test_a_product_in_int4_is_that_of_the_formula(outputs: int, inputs: int, group: int, count: int) -> None:
    torch.manual_seed(count)
    values = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    zeros, scales = torch.randint(0, 16, (outputs, inputs // group)), torch.rand(outputs, inputs // group)
    of_column = torch.arange(inputs) // group
    dense = (values - zeros[:, of_column]) * scales[:, of_column]
    # Of as many multiprocessors as make tiles of 64 and of 32 outputs, by count.
    layout = Layout(kernels("compute.int4_kernels").TritonKernels(num_multiprocessors=4))
    weight = Int4Weight(Int4Matrix(values, scales, -zeros * scales), torch.float32, layout)
    rows = torch.randn(count, inputs)
    exact = rows.double() @ dense.double().T
    torch.testing.assert_close(weight.multiply(rows).double(), exact, atol=2e-6 * float(exact.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("rows", "outputs", "tile"), [(100, 4096, 32), (256, 4096, 64), (1024, 4096, 64), (300, 512, 32)]
)
def test_tiles_are_small_where_a_product_would_leave_multiprocessors_idle(rows: int, outputs: int, tile: int) -> None:
    found = kernels("compute.int4_kernels").TritonKernels(num_multiprocessors=132).tiles(rows, outputs)
    assert found == ((-(-rows // 128), outputs // tile), tile)


RECURRENCES = {"delta": GatedDeltaRule(2, 4, 20, 24), "scan": SelectiveScan(4, 20, 2, 24, chunk_tokens=8)}


@pytest.mark.parametrize("ends", [(1,), (1, 2, 5), (3, 3)])
@pytest.mark.parametrize("name", RECURRENCES)
def test_states_that_are_advanced_within_their_slots_are_those_that_are_copied(
    name: str, ends: tuple[int, ...]
) -> None:
    """Slots lie apart, as columns of the input of a graph do; two ends of the same tokens have the same state."""
    exact, draw = RECURRENCES[name], torch.Generator().manual_seed(1)
    within = replace(exact, slot_kernels=kernels("generation.model.state_kernels").TritonStates())
    convolved, gates, weights = exact.sample(ends[-1], lambda *shape: torch.rand(shape, generator=draw) * 2 - 1)
    before = torch.randn(12, *exact.matrices, generator=draw)
    slots = torch.randperm(12, generator=draw)[: 2 * (1 + len(ends))].view(2, -1).T
    out, state = exact.advance(convolved, gates, weights, before[slots[0]])
    matrices = before.clone()
    found = within.advance_slots(convolved, gates, weights, matrices, ends, tuple(slots))
    torch.testing.assert_close(found, out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(matrices[slots[-1]], state, atol=1e-5, rtol=1e-5)
    for end, written in zip(ends, slots[1:], strict=True):
        part = [gate[:, :end] for gate in gates]
        _, state = exact.advance(convolved[:, :end], part, weights, before[slots[0]])
        torch.testing.assert_close(matrices[written], state, atol=1e-5, rtol=1e-5)
    others = [slot for slot in range(12) if slot not in slots[1:]]
    assert torch.equal(matrices[others], before[others])


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h_omni"])
def test_answers_with_draft_tokens_obey_the_law(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = kernels("generation.model.state_kernels").TritonStates()
    monkeypatch.setattr(TriedKernels, "fastest", lambda self, like: replace(self, slot_kernels=states))
    models = load_models(family, tmp_path)
    engine = TinyEngine(models.engine, max_draft_tokens=3, max_num_batched_tokens=8)
    asking = Question((Text((20, 21, 22) * 3),), 8)
    few = tuple((token, 100.0) for token in (20, 21, 22))  # answers of these repeat what the prompt says
    asked = engine.ask("0", asking.parts, SamplingParams(8, temperature=1.0, seed=1, logit_bias=few))
    engine.drain()
    assert_law(models, engine, [asking], [asked])
    assert engine.totals["draft_tokens"]


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from gridsieve.services.compute import int4_kernels
from gridsieve.services.generation.model import state_kernels

def compiled(kernel, tensors, **constants):
    types = dict(each.split(":") for each in tensors.split()) | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, {name: types.get(name, "i32") for name in kernel.arg_names}, places)
    options = {"num_warps": 8 if kernel is int4_kernels._multiply else 1}
    return compile(source, GPUTarget("cuda", int(sys.argv[1]), 32), options)

int4 = "rows:*bf16 packed:*i32 scales:*bf16 product:*bf16 dense:*bf16"
states = "matrices:*fp32 read:*i64 write:*i64 convolved:*bf16 out:*bf16 "
shared = [compiled(int4_kernels._multiply, int4, tile_rows=int4_kernels.TILE_ROWS, tile_outputs=each).metadata.shared
          for each in int4_kernels.TILE_OUTPUTS]
compiled(int4_kernels._dequantise, int4, tile_rows=32)
compiled(state_kernels._delta, states + "beta:*bf16 decay:*fp32", key_heads=16, value_heads=32, key_dim=128,
         value_dim=128, key_block=128, part=16)
compiled(state_kernels._scan, states + "time_steps:*fp32 rates:*fp32 skip:*fp32", heads=64, head_dim=64, groups=8,
         state_dim=128, state_block=128, part=16)
print(max(shared))
"""


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_kernels_compile_for_cards_and_fit_into_their_shared_memory(capability: int, tmp_path: Path) -> None:
    """Without a card. The interpreter takes code that the compiler does not."""
    ours = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, str(capability)]
    done = subprocess.run(command, env=os.environ | ours, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert int(done.stdout) <= 99 * 1024  # of a program on Ada, the least of these
