"""Assigns slices to ranks: the costliest slice first, each to the rank with the least load so far.

    costs  [1000, 100, 200, 50]      rank 0: slice 0          1000
                                     rank 1: slices 2, 1, 3    350

The largest load is at most a third above that of the best assignment. It knows neither torch nor what a slice is.
Source: R. L. Graham, Bounds on multiprocessing timing anomalies (1969), of the longest processing time first.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import NamedTuple


class Assignment(NamedTuple):
    """order: all slices, rank by rank. counts: slices of each rank. loads: their total cost."""

    order: list[int]
    counts: list[int]
    loads: list[int]

    @property
    def shares(self) -> list[list[int]]:
        """The slices of each rank."""
        ends = accumulate(self.counts)
        return [self.order[end - count : end] for count, end in zip(self.counts, ends, strict=True)]


def assign(costs: Sequence[int], ranks: int) -> Assignment:
    """Assigns each slice to a rank. costs: of each slice, at least 0. ranks: at least 1.

    Ties go to the earlier slice, and to the lower rank.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    for each in sorted(range(len(costs)), key=lambda each: -costs[each]):
        load, rank = loads[0]
        shares[rank].append(each)
        heapreplace(loads, (load + costs[each], rank))
    return Assignment(
        order=[each for share in shares for each in share],
        counts=[len(share) for share in shares],
        loads=[load for load, _ in sorted(loads, key=lambda each: each[1])],
    )
