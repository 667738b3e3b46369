"""Retries of calls that are lost, on another replica if there is one, within a budget.

    key      a refuses    back off
    key/1    a refuses    at once: another key finds another replica, or by chance the same one
    key/2    b answers

Where a channel is not `by_media`, gRPC retries calls by itself until their first response (`channels`), with the same
waits and budget.
"""

from __future__ import annotations

import asyncio
import random

import grpc

from gridsieve.common.affinity import Metadata
from gridsieve.common.channels import ATTEMPTS, BACKOFF_S, DO_NOT_RETRY, MEDIA_KEY, REPLICA_KEY
from gridsieve.common.contract.errors import DeadlinePassed, Unavailable

# The retry budget is counted in successes: a retry costs ten, and the budget holds at most 200 retries.
COST = 10
BURST = 200 * COST

# Of one call, tried without a wait. All of them find the same one of two replicas in one of 128 cases.
_KEYS = 8


class Retries:
    """The retry budget of all calls to one service: a burst, then one retry per ten successes. For one event loop.

    stage: the service. by_media: whether they go through such a channel.
    """

    def __init__(self, stage: str, *, by_media: bool = False) -> None:
        self.stage = stage
        self.by_media = by_media
        self.budget = BURST

    def succeeded(self) -> None:
        """Call it for each call that delivered everything."""
        self.budget = min(BURST, self.budget + 1)


class Attempts:
    """The attempts of one call.

    number: of the current attempt, from 1 on. metadata: of that attempt. timeout_s: for all attempts together; None for
    no limit.
    """

    def __init__(self, retries: Retries, metadata: Metadata, timeout_s: float | None) -> None:
        self.number = 1
        self.metadata = self._first = metadata
        self._retries = retries
        self._clock = asyncio.get_running_loop().time
        self._ends_s = None if timeout_s is None else self._clock() + timeout_s
        self._waits = 0
        self._refused_by = set[str | bytes]()  # values of REPLICA_KEY

    @property
    def left_s(self) -> float | None:
        return None if self._ends_s is None else max(0.0, self._ends_s - self._clock())

    async def next(self, lost: Unavailable, answered: bool) -> None:
        """Waits until the next attempt. Raises DeadlinePassed, and `lost` if there is none.

        answered: whether the current attempt had a response. Without one, the call is tried again only where its
        channel is `by_media` (on others gRPC has done that) and the refusal is not final.
        """
        if self.left_s == 0:  # while a call is being written to, gRPC may report UNAVAILABLE in this case
            raise DeadlinePassed(f"the deadline passed while waiting for {self._retries.stage}") from lost
        status = lost.__cause__
        assert isinstance(status, grpc.aio.AioRpcError)
        told = dict(status.trailing_metadata() or ())
        refused = status.code() is grpc.StatusCode.UNAVAILABLE and DO_NOT_RETRY not in told.items()
        if not answered and not (refused and self._retries.by_media):
            raise lost
        replica = "" if answered else told.get(REPLICA_KEY, "")
        waits = replica not in self._refused_by or self.number >= _KEYS
        if self._retries.budget < COST or (waits and self._waits == ATTEMPTS - 1):
            raise lost
        self._retries.budget -= COST
        if waits:
            await asyncio.sleep(BACKOFF_S * 2**self._waits * random.uniform(0.8, 1.2))  # noqa: S311  (no secret)
            self._waits += 1
        if replica:
            self._refused_by.add(replica)
        self.metadata = tuple(
            (name, f"{value}/{self.number}" if name == MEDIA_KEY else value) for name, value in self._first
        )
        self.number += 1
