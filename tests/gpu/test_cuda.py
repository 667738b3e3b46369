"""Tower and engine on a CUDA device compute what they compute on the CPU, within rounding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.compute.int4_linear import TORCH_ROWS, CudaLayout, Int4Weight, rounded_to_nearest
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.model.attention.block_plan import plan_blocks
from gridsieve.services.generation.model.attention.cache import CacheSizes
from gridsieve.services.generation.model.attention.flash_infer import check_kernels, find_kernels
from gridsieve.services.generation.model.delta_net import GatedDeltaRule
from gridsieve.services.generation.model.fp8_linear import FP8, GROUP, find_product, product_by_formula
from gridsieve.services.generation.model.fused_layers import ROTATION, RotaryTable
from gridsieve.services.generation.model.mamba2 import SelectiveScan
from gridsieve.services.generation.model.norms import FusedNorm, fuse_norms
from gridsieve.services.generation.model.recurrent_layer import TriedKernels
from gridsieve.services.generation.request.batch import Context
from gridsieve.services.generation.sampling.sampler import SamplingParams
from tests.families import FAMILIES, write_qwen3_vl_heads
from tests.oracle import Text
from tests.tiny import TinyEngine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

DEVICES = [torch.device("cpu"), torch.device("cuda")]
TOLERANCE = 1e-3


def test_the_tower_encodes_as_on_the_cpu(family: str, family_checkpoint: Path) -> None:
    """In float32, which the kernel does not take: of CLIP, SigLIP, Pixtral and InternViT by `attend_by_length`."""
    shape = FAMILIES[family]
    sides_px = (side * shape.token_px for side in shape.sized(4, 3))
    frames = torch.randint(
        0, 256, (shape.temporal_patch, *sides_px, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    on_cpu, on_cuda = (
        load_tower(Checkpoint(family_checkpoint), "float32", device).encode([frames])[0].cpu() for device in DEVICES
    )
    assert torch.allclose(on_cpu, on_cuda, atol=TOLERANCE)


SIZES = CacheSizes(layers=1, blocks=8, block_tokens=16, heads=28, kv_heads=4, head_dim=128)


@pytest.mark.parametrize("sizes", [SIZES, replace(SIZES, fp8=True), replace(SIZES, heads=16, head_dim=256)])
def test_flash_infer_is_correct_also_as_a_replayed_graph(sizes: CacheSizes) -> None:
    like = torch.zeros((), dtype=torch.bfloat16, device=DEVICES[1])
    kernels = find_kernels(sizes, like)
    if kernels is None:
        pytest.skip("FlashInfer is not installed, or has no kernel for this card")
    check_kernels(kernels, sizes, like)
    random = torch.Generator(like.device).manual_seed(0)
    shape = (2, sizes.blocks, sizes.block_tokens, sizes.kv_heads, sizes.head_dim)
    key, value = torch.randn(shape, generator=random, device=like.device).to(sizes.dtype(like))
    query = torch.randn(2, sizes.heads, sizes.head_dim, generator=random, device=like.device).to(like.dtype)
    prefill, padding = kernels.prefill(), Context(0, 1, (0,))
    decode, verify = (kernels.decode(2, 16), query, (1, 1)), (kernels.verify(6, 4, 16), query.repeat(3, 1, 1), (4, 2))
    for kernel, queries, counts in (decode, verify):
        kernel.plan(plan_blocks([padding] * len(queries), sizes.block_tokens))
        kernel.run(queries, key, value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = kernel.run(queries, key, value)
        for ends in ((5, 33), (70, 16), (counts[0], 128)):
            contexts = [
                Context(end - count, end, range(-(-end // sizes.block_tokens)))
                for end, count in zip(ends, counts, strict=True)
            ]
            kernel.plan(plan_blocks(contexts, sizes.block_tokens, len(queries)))
            graph.replay()
            prefill.plan(plan_blocks(contexts, sizes.block_tokens))
            assert torch.allclose(found, prefill.run(queries, key, value), atol=2e-2)


@pytest.mark.parametrize("count", [1, 16, 100])
def test_products_in_fp8_are_those_of_the_formula_also_as_a_replayed_graph(count: int) -> None:
    like = torch.zeros((), dtype=torch.bfloat16, device=DEVICES[1])
    outputs, inputs = 512, 3584
    product = find_product([(outputs, inputs)], like)
    if product is None:
        pytest.skip("this card has no products in fp8 by blocks")
    random = torch.Generator(like.device).manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=random, device=like.device).to(FP8)
    scales = torch.rand(outputs // GROUP, inputs // GROUP, generator=random, device=like.device)
    rows = torch.zeros(count, inputs, dtype=like.dtype, device=like.device)
    product(rows, weight, scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product(rows, weight, scales)
    for _ in range(2):
        rows.copy_(torch.randn(count, inputs, generator=random, device=like.device))
        graph.replay()
        expected = product_by_formula(rows, weight, scales)
        assert (found - expected).abs().max() < 1e-2 * expected.abs().max()


@pytest.mark.parametrize("count", [1, 16, 65, 300, 1100])
def test_products_in_int4_are_those_of_the_formula_also_as_a_replayed_graph(count: int) -> None:
    """Few rows by torch's product, more by Triton's, and still more by dequantised weights."""
    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("torch has no products in int4 on this card")
    random = torch.Generator(DEVICES[1]).manual_seed(0)
    weight = torch.randn(2560, 3584, generator=random, device=DEVICES[1])
    matrix = rounded_to_nearest(weight, 128)
    packed = Int4Weight(matrix, torch.bfloat16)
    assert isinstance(packed.layout, CudaLayout)
    assert packed.layout.few_rows > TORCH_ROWS, "Triton's kernels do not work here"
    rows = torch.zeros(count, 3584, dtype=torch.bfloat16, device=DEVICES[1])
    packed.multiply(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = packed.multiply(rows)
    for _ in range(2):
        rows.copy_(torch.randn(count, 3584, generator=random, device=DEVICES[1]))
        graph.replay()
        expected = rows.float() @ matrix.dense().T
        assert (found - expected).abs().max() < 1e-2 * expected.abs().max()


@pytest.mark.parametrize(
    "recurrence", [GatedDeltaRule(16, 32, 128, 128), SelectiveScan(64, 64, 8, 128, 128)], ids=["Qwen3.5", "Nemotron 3"]
)
def test_recurrent_states_are_advanced_within_their_slots(recurrence: TriedKernels) -> None:
    """A kernel is used only if it computes what torch's operators compute."""
    assert recurrence.fastest(torch.zeros((), dtype=torch.bfloat16, device=DEVICES[1])).slot_kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("joined", [False, True], ids=["rows", "heads of a joined product"])
def test_fused_norms_are_those_of_the_formula(dtype: torch.dtype, joined: bool) -> None:
    norm = Qwen3VLTextRMSNorm(128, eps=1e-6).to(DEVICES[1], dtype)
    text = torch.nn.Sequential(norm)
    norm.weight.data.normal_()
    rows = torch.randn(1, 33, 6, 128, device=DEVICES[1]).to(dtype)
    if joined:
        rows = rows[:, :, 1:5]
    exact = rows.double() * (rows.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight.double()
    fuse_norms(text)
    assert type(text[0]) is FusedNorm
    torch.testing.assert_close(text(rows).double(), exact, atol=1e-6, rtol=2**-8 if dtype is torch.bfloat16 else 1e-5)


# The two numbers of rows have kernels of their own.
@pytest.mark.parametrize("count", [9, 20_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_rotations_and_activations_are_those_of_the_formula(
    dtype: torch.dtype, count: int, tmp_path: Path
) -> None:
    heads, kv_heads, head_dim = 4, 2, 128
    write_qwen3_vl_heads(tmp_path, 7, heads, kv_heads, head_dim)
    text = load_language_model(Checkpoint(tmp_path), dtype, DEVICES[1]).text
    if not isinstance(text.rotary_emb, RotaryTable):
        pytest.skip("FlashInfer is not installed, or has no kernel for this card")
    close = partial(torch.testing.assert_close, rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=1e-5)
    product = torch.randn(1, count, heads + 2 * kv_heads, head_dim, device=DEVICES[1]).to(dtype)
    query, key, _ = product.transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
    positions = torch.randint(0, 30_000, (3, 1, count), device=DEVICES[1])
    rotate = type(text.layers[0].self_attn).forward.__globals__[ROTATION]
    cos, sin = (each.double() for each in text.rotary_emb.rotary(query.float(), positions))
    for rows, found in zip((query, key), rotate(query, key, *text.rotary_emb(query, positions)), strict=True):
        first, second = rows.double().chunk(2, dim=-1)
        close(found.double(), rows.double() * cos + torch.cat([-second, first], dim=-1) * sin)
    gate, up = product.flatten(2).double().chunk(2, dim=-1)
    close(text.layers[0].mlp.multiply(product.flatten(2)).double(), gate * gate.sigmoid() * up)


def test_the_engine_with_a_cache_in_fp8_computes_nearly_the_logits_of_the_cpu(family_checkpoint: Path) -> None:
    """Nearly: the last bit of a key decides now and then between its neighbours in fp8."""
    found = []
    for device in DEVICES:
        model = load_language_model(Checkpoint(family_checkpoint), torch.float32, device)
        tiny = TinyEngine(replace(model, fp8_cache=True), max_num_batched_tokens=5)
        tiny.ask("text", [Text(tuple(range(10, 30)))], SamplingParams(max_new_tokens=1))
        tiny.drain()
        found.append(torch.stack([row.cpu() for row in tiny.runner.logits["text"]]))
    assert torch.allclose(found[0], found[1], atol=0.1)
