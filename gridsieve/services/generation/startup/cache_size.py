"""Sizes the KV cache: the memory that a device has left after everything else has its maximum.

    total   [ others | weights and the largest step | graphs | KV cache                | · · · · ]
            └────────────────────────── fraction · total ────────────────────────────┘

The memory of the largest step is measured by running it: once a prefill, once a decode step, whose contexts the cache
may have to gather. This module is independent of settings.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import cycle, islice

import numpy as np
import torch

from gridsieve.services.generation.model.attention.sdpa import MAX_GATHERED_TOKENS
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.runner import Runner
from gridsieve.services.generation.request.batch import Context, Packed, slots_of
from gridsieve.services.generation.sampling.params import MAX_TOP_LOGPROBS
from gridsieve.services.generation.sampling.sampler import SamplingParams, SamplingState, choose

# What needs the most memory: a nucleus that is searched for in the whole vocabulary, beside log-probabilities.
_SAMPLING = SamplingParams(
    1, temperature=1.0, top_p=0.9, min_p=0.1, repetition_penalty=1.1, logprobs=True, top_logprobs=MAX_TOP_LOGPROBS
)


class CudaMemory:
    """Memory counters of one device, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settle(self) -> None:
        """Returns this process' unused reserved memory to the device and resets the peak counter."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def max_used(self) -> int:
        """Peak memory used by this process since `settle`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reserved(self) -> int:
        """Memory reserved by this process, used or not."""
        return torch.cuda.memory_reserved(self._device)

    def free_and_total(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self._device)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The maxima of a step.

    rows: tokens; sampled: rows whose logits are computed; requests: running sequences; context: tokens of one sequence.
    """

    rows: int
    sampled: int
    requests: int
    context: int


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory of a device that the KV cache cannot have, in bytes.

    others: of other processes and of CUDA itself. step: of this process during its largest step, weights included.
    graphs: of captured decode steps, in addition.
    """

    total: int
    others: int
    step: int
    graphs: int

    def cache_tokens(self, fraction: float, token_bytes: int, block_tokens: int, states_bytes: int = 0) -> int:
        """Tokens, in whole blocks, that fit if the process may use `fraction` of the device; below 1 if none fit.

        token_bytes: of one token's keys and values, in all layers. One block more is allocated for padding.
        states_bytes: of all slots of recurrent states.
        """
        budget = int(Fraction(str(fraction)) * self.total)
        available = budget - self.others - self.step - self.graphs - states_bytes
        return (available // (token_bytes * block_tokens) - 1) * block_tokens


def measure(
    model: LanguageModel,
    block_tokens: int,
    sizes: Sizes,
    memory: CudaMemory,
    capture: Callable[[Runner], object],
) -> Needs:
    """Measures the largest step, with a cache that holds only its rows, and then the captured graphs.

    capture: captures a runner's decode steps. Raises torch.OutOfMemoryError if the step does not fit.
    """
    memory.settle()
    blocks = -(-sizes.rows // block_tokens)
    runner = Runner(model, blocks, block_tokens)
    _largest_step(runner, blocks, block_tokens, sizes)
    _largest_decode_step(runner, blocks, block_tokens, sizes)
    step = memory.max_used() - model.token_bytes * block_tokens * (blocks + 1)
    memory.settle()
    reserved = memory.reserved()
    capture(runner)
    memory.settle()
    graphs = max(0, memory.reserved() - reserved)
    free, total = memory.free_and_total()
    others = total - free - memory.reserved()
    del runner
    memory.settle()
    return Needs(total, others, step, graphs)


def _largest_step(runner: Runner, blocks: int, block_tokens: int, sizes: Sizes) -> None:
    """The last chunk of the longest sequence, all rows media, with the maximum number of sampled rows.

    The block table of the context before it repeats the chunk's own blocks; the values read there do not matter.
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
        logit_rows=np.arange(rows)[-sizes.sampled :],
    )
    shape = (1 + model.embed_levels, rows, model.hidden_size)
    logits = runner.compute(packed, torch.zeros(shape, dtype=model.dtype, device=model.device))
    # `sample_and_verify` copies the rows of one position where there are draft tokens.
    sampled = logits[: sizes.requests].clone() if sizes.sampled > sizes.requests else logits
    if model.reads is None:
        choose(sampled, [SamplingState(_SAMPLING, np.zeros(1, np.int32)) for _ in sampled]).read()
    del logits, sampled  # the head that drafts reads a step once its tokens are read
    if runner.drafter:
        runner.drafter.try_rows(packed)


def _largest_decode_step(runner: Runner, blocks: int, block_tokens: int, sizes: Sizes) -> None:
    """One token of every running sequence, with contexts as long as the cache gathers at once.

    All block tables repeat the same blocks, as above.
    """
    rows = min(sizes.requests, sizes.rows)
    end = max(1, min(sizes.context, MAX_GATHERED_TOKENS // rows))
    own = [*islice(cycle(range(blocks)), -(-end // block_tokens))]
    runner.compute(
        Packed(
            contexts=(Context(end - 1, end, own),) * rows,
            num_decodes=rows,
            ids=np.zeros(rows, np.int64),
            positions=np.full((3, rows), end - 1),
            slots=np.repeat(slots_of(own, end - 1, end, block_tokens), rows),
            media_rows=np.empty(0, np.int64),
            logit_rows=np.arange(rows),
        ),
        None,
    )
