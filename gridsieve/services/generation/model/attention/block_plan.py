"""Where each sequence of a step has its rows and blocks, as kernels over a paged cache read it.

    sequences   a: 1 row, 9 tokens    b: 3 rows, 4 tokens        blocks of 4 tokens
    row_ends    [0, 1, 4]
    block_ends  [0, 3, 4]
    blocks      [7 2 5 | 3]
    last_block_tokens  [1, 4]

Computed once a step, in numpy. Source: the page table of FlashInfer, arXiv 2501.01005.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gridsieve.services.generation.request.batch import Context

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class BlockPlan:
    """row_ends, block_ends: int32 [S + 1]. blocks: int32 [P], numbered. last_block_tokens: int32 [S], at least 1."""

    row_ends: Int32Array
    block_ends: Int32Array
    blocks: Int32Array
    last_block_tokens: Int32Array


def plan_blocks(contexts: Sequence[Context], block_tokens: int, sequences: int = 0) -> BlockPlan:
    """Of at least one context, each with the blocks of its tokens and possibly more.

    sequences: if the contexts are fewer, sequences follow that have no row, and one token in the last one's block.
    """
    contexts = [*contexts, *repeat(contexts[-1]._replace(start=1, end=1), sequences - len(contexts))]
    ends = np.array([each.end for each in contexts], np.int32)
    counts = -(-ends // block_tokens)
    return BlockPlan(
        row_ends=_ends([each.tokens for each in contexts]),
        block_ends=_ends(counts),
        blocks=np.concatenate(
            [np.asarray(each.blocks[:count], np.int32) for each, count in zip(contexts, counts, strict=True)]
        ),
        last_block_tokens=(ends - 1) % block_tokens + 1,
    )


def last_slots(table: Tensor, lengths: Tensor, block_tokens: int) -> Tensor:
    """The slot of each sequence's last token, int64 [R], without a wait. table: int32 [R, W]. lengths: int32 [R]."""
    last = lengths.long() - 1
    return table.gather(1, (last // block_tokens)[:, None])[:, 0] * block_tokens + last % block_tokens


def _ends(lengths: Sequence[int] | Int32Array) -> Int32Array:
    return np.cumsum([0, *lengths], dtype=np.int32)
