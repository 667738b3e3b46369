"""Tries at the start whether a deterministic model keeps its promise on this machine, and in forwards of which sizes.

    expected    [ s  s  s  s  s  s  s  s ][ s  s  · ·  ·  ·  ·  · ]
    at others   [ o  o  o  s  s  s  s  s ][ s  s  s  s  s  ·  ·  · ]      and the same in each other size

The order in which a kernel adds depends on sizes, places and the number of threads, and not on values. So one sequence
of random tokens shows it.
"""

from __future__ import annotations

import numpy as np
import structlog
import torch
from torch import Tensor

from gridsieve.common.contract.errors import StartupError
from gridsieve.services.generation.model.determinism import row_sizes
from gridsieve.services.generation.model.runner import Runner
from gridsieve.services.generation.model.states import PADDING, RESERVED, ZERO
from gridsieve.services.generation.parallel.group import Group
from gridsieve.services.generation.request.batch import Context, Packed, StateUse, slots_of

# So many tokens more than the largest forward has rows. Of small ones so many forwards are enough.
MORE_TOKENS, FORWARDS = 43, 8
# Other sequences before it, of one token each.
OTHERS = 5

log = structlog.get_logger()


def use_equal_sizes(runner: Runner, blocks: int, block_tokens: int, group: Group | None = None) -> None:
    """Makes a runner of a deterministic model use all sizes of forwards in which rows have the same bits.

    Before the first request: it overwrites blocks and a state. Every rank calls it. Raises StartupError if the bits of
    a row depend on its place in a forward.
    """
    first, *more = row_sizes(runner.model)
    tokens = min(max(first, *more) + MORE_TOKENS, blocks * block_tokens)
    expected = _logits(runner, first, tokens, 0, block_tokens)

    def alike(size: int) -> bool:
        count = min(tokens, size * FORWARDS)
        found = torch.equal(_logits(runner, size, count, OTHERS, block_tokens), expected[:count])
        return bool(group.least(int(found))) if group else found

    if not alike(first):
        device = runner.model.device
        on_cpu = device.type == "cpu"
        threads = f" with --threads {torch.get_num_threads()}" if on_cpu else ""
        remedy = "; set --threads to a power of two" if on_cpu else ""
        raise StartupError(
            f"--deterministic: on {device}{threads}, the bits of a row depend on its place among the {first} of a "
            f"forward{remedy}"
        )
    runner.row_sizes = (first, *(size for size in more if alike(size)))
    log.info("deterministic", rows_of_a_forward=sorted(runner.row_sizes))


def _logits(runner: Runner, size: int, tokens: int, others: int, block_tokens: int) -> Tensor:
    """Of every token of one random sequence, [tokens, vocab_size], after others in forwards of one size."""
    model, padding = runner.model, runner.padding_block
    own = Context(0, tokens, range(-(-tokens // block_tokens)))
    ids = np.random.default_rng(0).integers(0, model.vocab_size, tokens)
    runner.row_sizes = (size,)
    computed = runner.compute(
        Packed(
            contexts=(*[Context(0, 1, (padding,))] * others, own),
            num_decodes=others,
            ids=np.concatenate([np.zeros(others, np.int64), ids]),
            positions=np.tile(np.concatenate([np.zeros(others, np.int64), np.arange(tokens)]), (3, 1)),
            slots=np.concatenate(
                [np.full(others, padding * block_tokens), slots_of(own.blocks, 0, tokens, block_tokens)]
            ),
            media_rows=np.empty(0, np.int64),
            logit_rows=np.arange(others + tokens),
            states=(*[StateUse(ZERO, PADDING)] * others, StateUse(ZERO, RESERVED)) if model.states else (),
        ),
        None,
    )
    return computed[others:]
