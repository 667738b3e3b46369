"""The KV cache takes what a device has left beside the largest step, and never more than it may.

No CUDA here: the step is run for real, and its memory is counted by a device that is made up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from services.generation.families import load_language_model
from services.generation.model.attention import sdpa
from services.generation.model.language_model import LanguageModel
from services.generation.model.runner import Runner
from services.generation.settings import GenerationSettings
from services.generation.startup.build import BLOCK_TOKENS, build, fitting_tokens
from services.generation.startup.cache_size import Needs

MIB, GIB = 2**20, 2**30
BYTES = st.integers(0, 200 * GIB)


@given(
    total=BYTES,
    others=BYTES,
    step=BYTES,
    graphs=BYTES,
    media=BYTES,
    fraction=st.floats(0.01, 1),
    token_bytes=st.integers(1, MIB),
    block_tokens=st.integers(1, 64),
)
def test_the_cache_fills_the_budget_and_never_exceeds_it(
    total: int,
    others: int,
    step: int,
    graphs: int,
    media: int,
    fraction: float,
    token_bytes: int,
    block_tokens: int,
) -> None:
    tokens = Needs(total, others, step, graphs, media).cache_tokens(fraction, token_bytes, block_tokens)
    left = Fraction(str(fraction)) * total - others - step - graphs - media
    assert tokens % block_tokens == 0
    # A block more than its tokens need is there to fill batches up.
    assert (tokens + block_tokens) * token_bytes <= left or left < 0 > tokens
    assert (tokens + 2 * block_tokens) * token_bytes > left - 1


@dataclass
class MadeUp:
    """A device's memory: what the step takes is in use while the model runs, as its caches say what they take."""

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

    def most_used(self) -> int:
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

    def capture(self, runner: Runner, settings: GenerationSettings, most_tokens: int) -> bool:
        self.captured.append(most_tokens)
        return True


@pytest.fixture
def memory(family_checkpoint: Path) -> MadeUp:
    model = load_language_model(Checkpoint(family_checkpoint), torch.float32, torch.device("cpu"))
    made_up = MadeUp(model)
    model.text.register_forward_pre_hook(made_up.watch, with_kwargs=True)
    return made_up


def settings(*flags: str) -> GenerationSettings:
    return GenerationSettings.load(["--media-buffer-bytes", str(GIB), *flags])


def test_what_the_largest_step_leaves_is_the_caches(memory: MadeUp) -> None:
    sampled: list[int] = []
    memory.model.lm_head.register_forward_pre_hook(lambda _, rows: sampled.append(len(rows[0])))
    told = settings("--max-num-batched-tokens", "100", "--max-num-seqs", "9", "--speculative-tokens", "2")
    tokens = fitting_tokens(told, memory.model, None, memory, memory.capture)
    left = int(Fraction(9, 10) * memory.total) - (300 + 2048 + 700 + 50 + 1024) * MIB
    # Of each of three layers two KV heads of sixteen float32, keys and values.
    assert memory.model.token_bytes == 3 * 2 * 16 * 4 * 2
    assert tokens == (left // (768 * BLOCK_TOKENS) - 1) * BLOCK_TOKENS
    levels = memory.model.embed_levels
    assert memory.rows == [(100, levels, 100 if levels else 0), (9, 0, 0)]
    assert sampled == [27, 9]
    assert memory.captured == [memory.model.context_tokens]


def test_as_many_tokens_are_gathered_as_ever_are(memory: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that reads no context in its place."""
    gathered: list[int] = []
    read = sdpa._read

    def count(layer: Tensor, slots: slice | Tensor) -> Tensor:
        if isinstance(slots, Tensor):
            gathered.append(slots.numel())
        return read(layer, slots)

    monkeypatch.setattr(sdpa, "_read", count)
    monkeypatch.setattr(sdpa, "IN_PLACE_TOKENS", 10**9)
    told = settings("--max-num-batched-tokens", "100", "--max-num-seqs", "9")
    fitting_tokens(told, memory.model, None, memory, memory.capture)
    assert max(gathered) == sdpa.MOST_GATHERED_TOKENS // 9 * 9 > 32768


def test_the_fraction_is_of_the_whole_device(memory: MadeUp) -> None:
    def fitting(*flags: str) -> int:
        told = settings("--max-num-batched-tokens", "64", "--max-model-len", "512", *flags)
        return fitting_tokens(told, memory.model, None, memory, memory.capture)

    less, more = fitting("--gpu-memory-fraction", "0.6"), fitting("--gpu-memory-fraction", "0.85")
    assert abs((more - less) * 768 - 0.25 * memory.total) < 2 * 768 * BLOCK_TOKENS


@dataclass(frozen=True)
class Ranks:
    """Others, one of which has room for less."""

    fits: int

    def least(self, number: int) -> int:
        return min(number, self.fits)


def test_the_rank_with_the_least_room_decides(memory: MadeUp) -> None:
    told = settings("--max-num-batched-tokens", "64", "--max-model-len", "512")
    alone = fitting_tokens(told, memory.model, None, memory, memory.capture)
    others: Any = Ranks(1024)
    assert alone > 1024 == fitting_tokens(told, memory.model, others, memory, memory.capture)
    others = Ranks(alone + 16)
    assert fitting_tokens(told, memory.model, others, memory, memory.capture) == alone


def test_a_device_that_holds_no_prompt_refuses_to_start_with_figures(memory: MadeUp) -> None:
    memory.total = 4 * GIB
    told = settings("--max-num-batched-tokens", "64", "--max-model-len", "512")
    with pytest.raises(StartupError) as refused:
        fitting_tokens(told, memory.model, None, memory, memory.capture)
    said = str(refused.value)
    assert "0 tokens of KV cache fit in 0.9 of a device (--gpu-memory-fraction), a prompt needs 512" in said
    assert "in GiB: total 4.00, others 0.29, step 2.68, graphs 0.05, media 1.00; a token takes 768 bytes" in said


def test_a_step_that_does_not_fit_refuses_to_start_and_says_what_to_lower(memory: MadeUp) -> None:
    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    memory.model.text.register_forward_pre_hook(no_room)
    told = settings("--max-num-batched-tokens", "64", "--max-model-len", "512")
    with pytest.raises(StartupError, match=r"a step of 64 tokens .* of a prompt of 512 .* does not fit on"):
        fitting_tokens(told, memory.model, None, memory, memory.capture)


@pytest.mark.parametrize(("flags", "tokens"), [((), 32768), (("--kv-cache-tokens", "500"), 512)])
def test_on_the_cpu_and_where_it_is_told_nothing_is_measured(
    tiny_checkpoint: Path, flags: tuple[str, ...], tokens: int
) -> None:
    built = build(settings("--model", str(tiny_checkpoint), "--device", "cpu", *flags), Checkpoint(tiny_checkpoint))
    assert built.blocks * BLOCK_TOKENS == tokens


def test_what_is_loaded_and_captured_finds_its_device_the_current_one(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[torch.device] = []

    def load(*_: object) -> None:
        assert current == [torch.device("cuda", 1)]
        raise StartupError("as far as a CPU goes")

    monkeypatch.setattr("services.generation.startup.build.device_of", lambda *_: torch.device("cuda", 1))
    monkeypatch.setattr("services.generation.startup.build.load_language_model", load)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    with pytest.raises(StartupError, match="as far as"):
        build(settings("--model", str(tiny_checkpoint)), Checkpoint(tiny_checkpoint))
