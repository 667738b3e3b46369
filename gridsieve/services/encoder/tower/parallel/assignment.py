"""Assigns slices to ranks: the costliest slice first, each to the rank with the least load so far.

    costs  [1000, 100, 200, 50]      rank 0: slice 0          1000
                                     rank 1: slices 1, 2, 3    350

The largest load is at most a third above that of the best assignment. It knows neither torch nor what a slice is.
Source: R. L. Graham, Bounds on multiprocessing timing anomalies (1969), of the longest processing time first.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace


def assign(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """The slices of each rank, ascending. costs: of each slice, at least 0. ranks: at least 1.

    Ties go to the earlier slice, and to the lower rank.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    for each in sorted(range(len(costs)), key=lambda each: -costs[each]):
        load, rank = loads[0]
        shares[rank].append(each)
        heapreplace(loads, (load + costs[each], rank))
    return [sorted(share) for share in shares]
