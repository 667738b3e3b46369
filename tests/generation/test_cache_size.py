"""The KV cache gets the memory that the largest step leaves within the budget, and no more.

Runs without CUDA: the step really runs, its memory use is reported by a fake device.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.loading.draft_head import load_draft_head
from gridsieve.services.generation.model.attention import sdpa
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.runner import Runner
from gridsieve.services.generation.sampling.sampler import SamplingParams, SamplingState, choose
from gridsieve.services.generation.settings import GenerationSettings
from gridsieve.services.generation.startup.build import BLOCK_TOKENS, build, fitting_tokens, step_limits
from gridsieve.services.generation.startup.cache_size import _SAMPLING, CudaMemory
from tests.drafts import SPECFORGE, write_head
from tests.generation.distant_device import DistantDevice

MIB, GIB = 2**20, 2**30
CPU = torch.device("cpu")


@dataclass
class FakeMemory(CudaMemory):
    """Memory of a fake device: a running step uses `step` bytes plus its cache."""

    model: LanguageModel
    total: int = 8 * GIB
    others: int = 300 * MIB
    weights: int = 2 * GIB
    step: int = 700 * MIB
    graphs: int = 50 * MIB
    cache_tokens: int = 0
    captured: list[int] = field(default_factory=list)
    rows: list[tuple[int, int, int]] = field(default_factory=list)
    _most: int = 0

    def settle(self) -> None:
        self._most = self.weights

    def max_used(self) -> int:
        return self._most

    def reserved(self) -> int:
        return self.weights + self.graphs * len(self.captured)

    def free_and_total(self) -> tuple[int, int]:
        return self.total - self.others - self.reserved(), self.total

    def watch(self, text: nn.Module, _: object, called_with: dict[str, Any]) -> None:
        rows = called_with["inputs_embeds"].shape[1]
        levels = called_with.get("deepstack_visual_embeds", torch.zeros(0, 0, 0)).shape
        self.rows.append((rows, levels[0], levels[1]))
        cache = -(-rows // BLOCK_TOKENS) * BLOCK_TOKENS + BLOCK_TOKENS
        self._most = max(self._most, self.weights + self.step + cache * self.model.token_bytes)

    def capture(self, runner: Runner, max_rows: int, max_tokens: int) -> bool:
        self.captured.append(max_tokens)
        return True


@pytest.fixture
def memory(checkpoints: Callable[[str], Path]) -> FakeMemory:
    model = load_language_model(Checkpoint(checkpoints("qwen3_vl")), torch.float32, torch.device("cpu"))
    memory = FakeMemory(model)
    model.text.register_forward_pre_hook(memory.watch, with_kwargs=True)
    return memory


def limits(*flags: str) -> GenerationSettings:
    return GenerationSettings.load(list(flags))


def fitting(memory: FakeMemory, *flags: str, group: Any = None) -> int:
    small = limits("--max-num-batched-tokens", "64", "--max-model-len", "512", *flags)
    return fitting_tokens(small, step_limits(small, CPU), memory.model, group, memory, memory.capture)


def test_the_cache_gets_what_the_largest_step_leaves(memory: FakeMemory) -> None:
    sampled: list[int] = []
    memory.model.lm_head.register_forward_pre_hook(lambda _, rows: sampled.append(len(rows[0])))
    steps = ("--max-num-batched-tokens", "100", "--max-num-seqs", "9", "--speculative-tokens", "2")
    flags = limits(*steps, "--gpu-memory-fraction", "0.8")
    tokens = fitting_tokens(flags, step_limits(flags, CPU), memory.model, None, memory, memory.capture)
    left = int(Fraction(8, 10) * memory.total) - (300 + 2048 + 700 + 50) * MIB
    # Three layers, two KV heads of sixteen float32, keys and values.
    assert memory.model.token_bytes == 3 * 2 * 16 * 4 * 2
    assert tokens == (left // (768 * BLOCK_TOKENS) - 1) * BLOCK_TOKENS
    assert memory.rows == [(100, 2, 100), (9, 0, 0)]
    assert sampled == [27, 9]
    assert memory.captured == [memory.model.context_tokens]


def test_what_the_head_that_drafts_reads_of_the_largest_step_is_measured(memory: FakeMemory, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", SPECFORGE, memory.model.hidden_size, memory.model.vocab_size)
    memory.model = replace(memory.model, draft=load_draft_head(Checkpoint(folder), memory.model))
    read, head = list[tuple[int, ...]](), memory.model.draft
    assert head
    head.register_forward_pre_hook(lambda _, inputs: read.extend((*inputs[0].shape, *inputs[1].shape)))
    assert fitting(memory, "--max-num-batched-tokens", "100") > 0
    assert read == [100, memory.model.hidden_size] * 2


def test_the_measured_decode_step_gathers_the_maximum(memory: FakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that never reads a context in place."""
    gathered: list[int] = []
    read = sdpa.read_slots

    def count(layer: Tensor, slots: slice | Tensor, dtype: torch.dtype) -> Tensor:
        gathered.append(slots.numel() if isinstance(slots, Tensor) else 0)
        return read(layer, slots, dtype)

    monkeypatch.setattr(sdpa, "read_slots", count)
    monkeypatch.setattr(sdpa, "IN_PLACE_TOKENS", 10**9)
    flags = limits("--max-num-batched-tokens", "100", "--max-num-seqs", "9")
    fitting_tokens(flags, step_limits(flags, CPU), memory.model, None, memory, memory.capture)
    assert max(gathered) == sdpa.MAX_GATHERED_TOKENS // 9 * 9 > 32768


def test_a_cache_in_fp8_holds_as_many_tokens_as_one_byte_a_value_allows(memory: FakeMemory) -> None:
    memory.model = replace(memory.model, fp8_cache=True)
    left = int(Fraction(9, 10) * memory.total) - (300 + 2048 + 700 + 50) * MIB
    assert fitting(memory) == (left // (3 * 2 * 16 * 2 * BLOCK_TOKENS) - 1) * BLOCK_TOKENS


def test_the_setting_decides_how_the_cache_stores(tiny_checkpoint: Path) -> None:
    for flags, dtype in (((), torch.float32), (("--kv-cache-dtype", "fp8"), torch.float8_e4m3fn)):
        runner = build(limits("--device", "cpu", "--kv-cache-tokens", "64", *flags), Checkpoint(tiny_checkpoint)).runner
        assert isinstance(runner._cache, sdpa.SdpaCache)
        assert {each.dtype for each in (*runner._cache.keys, *runner._cache.values)} == {dtype}


def test_the_rank_with_the_least_memory_decides(memory: FakeMemory) -> None:
    alone = fitting(memory)
    assert fitting(memory, group=SimpleNamespace(least=partial(min, 1024))) == 1024 < alone


def test_a_device_that_cannot_hold_a_prompt_is_refused(memory: FakeMemory) -> None:
    memory.total = 3 * GIB
    with pytest.raises(StartupError, match=r"fit in 0.9 .* needs 512; in GiB: total 3.00, others 0.29, step 2.68"):
        fitting(memory)


def test_a_step_that_does_not_fit_is_refused_with_the_flags_to_lower(memory: FakeMemory) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    memory.model.text.register_forward_pre_hook(out_of_memory)
    with pytest.raises(StartupError, match=r"64 tokens \(--max-num-batched-tokens\) .* does not fit"):
        fitting(memory)


# 16384 of them for live sessions.
@pytest.mark.parametrize(("flags", "tokens"), [((), 32768 + 16384), (("--kv-cache-tokens", "500"), 512)])
def test_nothing_is_measured_on_the_cpu_or_with_a_given_size(
    tiny_checkpoint: Path, flags: tuple[str, ...], tokens: int
) -> None:
    assert build(limits("--device", "cpu", *flags), Checkpoint(tiny_checkpoint)).blocks * BLOCK_TOKENS == tokens


class Allocated(TorchDispatchMode):
    """Counts the bytes of all tensors that operations have made and that still exist, and the most that there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._holders = Counter[int]()  # of each storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                self._count(storage._cdata, storage.nbytes(), 1)
                weakref.finalize(each, self._count, storage._cdata, storage.nbytes(), -1)
        return made

    def _count(self, storage: int, size: int, holders: int) -> None:
        held = self._holders[storage] > 0
        self._holders[storage] += holders
        self.now += size * ((self._holders[storage] > 0) - held)
        self.most = max(self.most, self.now)


wishes = st.builds(
    SamplingParams,
    st.just(1),
    temperature=st.sampled_from([0.0, 1.0]),
    top_p=st.sampled_from([0.9, 1.0]),
    top_k=st.sampled_from([0, 50, 1024, 1025, 9999]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.1]),
    logprobs=st.just(True),
    top_logprobs=st.sampled_from([0, 20]),
    logit_bias=st.sampled_from([(), ((3, 1.0), (4, -100.0))]),
)


@settings(max_examples=15, deadline=None)
@given(st.lists(wishes, min_size=4, max_size=4))
def test_nothing_that_requests_may_ask_of_the_sampler_needs_more_memory_than_is_measured(
    batch: list[SamplingParams],
) -> None:
    def most(batch: list[SamplingParams]) -> int:
        logits, states = torch.randn(4, 10_000), [SamplingState(each, np.arange(9, dtype=np.int32)) for each in batch]
        with torch.inference_mode(), Allocated() as allocated, DistantDevice() as device:
            choose(device.put(logits), states)
        return allocated.most

    assert most(batch) <= most([_SAMPLING] * 4)
