"""The towers of several ranks as one: the slices of a forward are shared out, run at once, and returned in order.

    rank 0   assign ─▶ tell, send ─▶ run its own share ─▶ hear ─▶ receive ─▶ in order
    rank r                 receive ─▶ run its share ─▶ answer ─▶ send

Where a rank ends, the tower has: callers are told which it was and how it ended. A forward that fails on a rank fails
here, and the next one runs. It knows neither how ranks are started nor what a batch is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor

from services.encoder.tower.graph_buckets import Packing, Size
from services.encoder.tower.parallel.assignment import assign
from services.encoder.tower.parallel.exchange import TIMEOUT, Exchange, packed
from services.encoder.tower.parallel.rank_failure import Loss
from services.encoder.tower.parallel.share import DONE, NO_MEMORY, encode_share, packing_of, room_for
from services.encoder.tower.tower import Tower

log = structlog.get_logger()


class Others(Protocol):
    """What rank 0 needs of the ranks beside it; see `common.ranks.Ranks`."""

    def tell_one(self, rank: int, message: bytes) -> None: ...

    def hear(self, rank: int, within_s: float) -> bytes: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Errand:
    """A share of another rank: its slices by index, their frames as they are sent, and room for what they become."""

    rank: int
    share: Sequence[int]
    shapes: bytes
    frames: Tensor
    embeds: Tensor


class _Broken(Exception):
    """Two ranks are out of step, for good."""


class DataParallelTower:
    """own: the tower of rank 0, this process; others: ranks 1 to count − 1, which `exchange` reaches.

    most_tokens: of one forward of one rank. loss: noted where one of them ends.
    """

    def __init__(
        self, own: Tower, others: Others, count: int, exchange: Exchange, most_tokens: int, loss: Loss
    ) -> None:
        self.own = own
        self.loss = loss
        self.budget_tokens = most_tokens * count  # of a forward of all ranks
        self._others = others
        self._count = count
        self._exchange = exchange
        self._packing = packing_of(own, most_tokens)

    @property
    def packing(self) -> Packing:
        """How many slices `encode` is best given at once: what fills a forward of every rank."""
        one = self._packing.largest
        largest = Size(one.tokens * self._count, one.slices * self._count, one.windows * self._count)
        return Packing(largest, self._packing.size_of)

    def encode(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """As `Tower.encode`, on the device of rank 0. Raises Unavailable once a rank has ended."""
        if self._count == 1:
            return self.own.encode(slices)
        if self.loss.lost is None:
            try:
                with torch.inference_mode():
                    return self._encode(slices)
            except _Broken:
                if not self.loss.known():
                    log.exception("a rank does not answer")
                    self._others.kill()
                    self.loss.known()
        raise self.loss.error

    def _encode(self, slices: Sequence[Tensor]) -> list[Tensor]:
        tokens = [self.own.patches.tokens(frames.shape) for frames in slices]
        # Each in the order of the slices, in which equal sizes are neighbours.
        mine, *theirs = [
            sorted(share) for share in assign([self.own.cost(each) for each in tokens], self._count).shares
        ]
        errands = [
            self._errand(rank, share, [slices[each] for each in share], sum(tokens[each] for each in share))
            for rank, share in enumerate(theirs, start=1)
            if share
        ]
        sent = [self._send(errand) for errand in errands]
        failures: list[Exception] = []
        found = room_for(self.own, 0)
        try:
            found = encode_share(self.own, [slices[each] for each in mine], self._packing)
        except torch.AcceleratorError:  # nothing can be received either
            raise
        except Exception as error:  # raised once all ranks are heard, which so stay in step
            failures.append(error)
        for errand, work in zip(errands, sent, strict=True):
            failures += self._collect(errand, work)
        if failures:
            raise failures.pop(0)  # what is raised holds this frame, which may not hold it in turn
        return _in_order([(mine, found), *((errand.share, errand.embeds) for errand in errands)], tokens)

    def _errand(self, rank: int, share: Sequence[int], slices: Sequence[Tensor], tokens: int) -> _Errand:
        """With all memory that it needs: once a rank is told, nothing may come between."""
        shapes = json.dumps([list(frames.shape) for frames in slices]).encode()
        return _Errand(rank, share, shapes, packed(slices, self.own.device), room_for(self.own, tokens))

    def _send(self, errand: _Errand) -> Any:
        with _in_step():
            self._others.tell_one(errand.rank, errand.shapes)
            return self._exchange.send(errand.frames, errand.rank)

    def _collect(self, errand: _Errand, work: Any) -> list[Exception]:
        """Fills the errand's room, or tells why there is nothing to fill it with."""
        with _in_step():
            work.wait()
            answer = self._others.hear(errand.rank, TIMEOUT.total_seconds())
            if answer == DONE:
                self._exchange.receive(errand.embeds, errand.rank)
        if answer == DONE:
            return []
        failure = torch.OutOfMemoryError if answer == NO_MEMORY else RuntimeError
        return [failure(f"rank {errand.rank}: {answer.decode()}")]


@contextmanager
def _in_step() -> Iterator[None]:
    """Around all that is said to another rank: what fails in it cannot be made good."""
    try:
        yield
    except torch.AcceleratorError:
        raise
    except (OSError, RuntimeError) as error:
        raise _Broken from error


def _in_order(shares: Sequence[tuple[Sequence[int], Tensor]], tokens: Sequence[int]) -> list[Tensor]:
    """Each slice's embeddings. shares: which slices, and (1 + levels, their tokens, D)."""
    found = {
        each: embeds
        for share, all_embeds in shares
        for each, embeds in zip(share, all_embeds.split([tokens[i] for i in share], dim=1), strict=True)
    }
    return [found[each] for each in range(len(tokens))]
