"""How many tokens the KV cache holds: what a device has left when everything else has all that it ever needs.

    total   [ others | weights and the largest step | graphs | media | KV cache                | · · · · ]
            └────────────────────────── fraction · total ────────────────────────────────────┘

The largest step is run, and what it takes is measured: of prompts, and of answers, whose contexts a cache may have to
gather. It knows neither settings nor how memory is counted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import cycle, islice
from typing import Protocol

import numpy as np
import torch

from services.generation.model.attention.sdpa import MOST_GATHERED_TOKENS
from services.generation.model.language_model import LanguageModel
from services.generation.model.runner import Runner
from services.generation.request.batch import Context, Packed, slots_of
from services.generation.sampling.sampler import SamplingParams, SamplingState, sample

# Whatever a request may ask of the sampler at once.
_SAMPLING = SamplingParams(
    1, temperature=1.0, top_p=0.9, top_k=50, min_p=0.1, repetition_penalty=1.1, logprobs=True, top_logprobs=5
)


class Memory(Protocol):
    """Of one device, in bytes."""

    def settle(self) -> None:
        """Gives back what this process has reserved and does not use, and forgets the most that it ever used."""

    def most_used(self) -> int:
        """The most that this process used at a time since it settled."""

    def reserved(self) -> int:
        """What this process has reserved, used or not."""

    def free_and_total(self) -> tuple[int, int]: ...


class CudaMemory:
    """What `Memory` says, of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settle(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def most_used(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def free_and_total(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self._device)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The most of everything that a step may have.

    rows: tokens; sampled: of these, those whose logits are wanted; requests: that run; context: tokens of one sequence.
    """

    rows: int
    sampled: int
    requests: int
    context: int


@dataclass(frozen=True, slots=True)
class Needs:
    """What a device holds besides the cache, in bytes.

    others: other processes', and what CUDA takes for itself. step: this process's at its largest step, weights
    included. graphs: beside that, for replayed decode steps. media: embeddings that requests wait with.
    """

    total: int
    others: int
    step: int
    graphs: int
    media: int

    def cache_tokens(self, fraction: float, token_bytes: int, block_tokens: int) -> int:
        """Tokens of whole blocks that fit in so large a part of the device; below 1 if none do.

        token_bytes: of one token's keys and values, in all layers. Besides, the cache has a block for padding.
        """
        budget = int(Fraction(str(fraction)) * self.total)
        room = budget - self.others - self.step - self.graphs - self.media
        return (room // (token_bytes * block_tokens) - 1) * block_tokens


def measure(
    model: LanguageModel,
    block_tokens: int,
    sizes: Sizes,
    media_bytes: int,
    memory: Memory,
    capture: Callable[[Runner], object],
) -> Needs:
    """Runs the largest step with a cache that holds no more than its rows, then captures.

    capture: has a runner's decode steps captured. Raises torch.OutOfMemoryError if even that does not fit.
    """
    memory.settle()
    blocks = -(-sizes.rows // block_tokens)
    runner = Runner(model, blocks, block_tokens)
    _largest_step(runner, blocks, block_tokens, sizes)
    _largest_decode_step(runner, blocks, block_tokens, sizes)
    step = memory.most_used() - model.token_bytes * block_tokens * (blocks + 1)
    memory.settle()
    reserved = memory.reserved()
    capture(runner)
    memory.settle()
    graphs = max(0, memory.reserved() - reserved)
    free, total = memory.free_and_total()
    others = total - free - memory.reserved()
    del runner
    memory.settle()
    return Needs(total, others, step, graphs, media_bytes)


def _largest_step(runner: Runner, blocks: int, block_tokens: int, sizes: Sizes) -> None:
    """The last rows of the longest sequence, nearly all of them media, as many of them sampled from as may be.

    The blocks before them are theirs again and again: what is read there matters to nobody.
    """
    model, rows = runner.model, sizes.rows
    start = max(0, sizes.context // block_tokens * block_tokens - blocks * block_tokens)
    own = list(range(blocks))
    packed = Packed(
        contexts=(Context(start, start + rows, [*islice(cycle(own), start // block_tokens), *own]),),
        num_decodes=int(rows == 1),
        ids=np.zeros(rows, np.int64),
        positions=np.tile(np.arange(start, start + rows), (3, 1)),
        slots=slots_of(own, 0, rows, block_tokens),
        media_rows=np.arange(rows),
        last_rows=np.arange(rows)[-sizes.sampled :],
    )
    shape = (1 + model.embed_levels, rows, model.hidden_size)
    logits = runner.compute(packed, torch.zeros(shape, dtype=model.dtype, device=model.device))
    prompt = np.zeros(1, np.int32)
    sample(logits[: sizes.requests], [SamplingState(_SAMPLING, prompt) for _ in logits[: sizes.requests]])


def _largest_decode_step(runner: Runner, blocks: int, block_tokens: int, sizes: Sizes) -> None:
    """One token of each request that may run, whose sequences are as long as are gathered at once.

    They stand in the same blocks again and again, as above.
    """
    rows = min(sizes.requests, sizes.rows)
    end = max(1, min(sizes.context, MOST_GATHERED_TOKENS // rows))
    own = [*islice(cycle(range(blocks)), -(-end // block_tokens))]
    runner.compute(
        Packed(
            contexts=(Context(end - 1, end, own),) * rows,
            num_decodes=rows,
            ids=np.zeros(rows, np.int64),
            positions=np.full((3, rows), end - 1),
            slots=np.repeat(slots_of(own, end - 1, end, block_tokens), rows),
            media_rows=np.empty(0, np.int64),
            last_rows=np.arange(rows),
        ),
        None,
    )
