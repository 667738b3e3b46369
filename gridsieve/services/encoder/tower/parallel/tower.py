"""The towers of several ranks as one: slices of a forward are shared out, encoded in parallel, returned in order.

    rank 0   assign ─▶ send order, patches ─▶ encode its own share ─▶ receive answer, embeddings ─▶ restore the order
    rank r            receive order, patches ─▶ encode its share ─▶ send answer, embeddings

If a rank ends, the tower has failed for good, and the error names the rank and how it ended. A forward that fails on
one rank fails as a whole; the next one runs. Sounds are not shared out: rank 0 alone has a sound tower. It knows
neither how ranks are started nor what a batch is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any, Protocol, TypeVar

import structlog
import torch
from torch import Tensor

from gridsieve.common.contract.errors import Unavailable
from gridsieve.services.compute.rank_failure import RankFailure
from gridsieve.services.encoder.tower.graph_buckets import PackingLimit, Size, fitting, token_limit
from gridsieve.services.encoder.tower.parallel.assignment import assign
from gridsieve.services.encoder.tower.parallel.exchange import TIMEOUT, Exchange, announced, packed
from gridsieve.services.encoder.tower.patches import Frames
from gridsieve.services.encoder.tower.sound import Sound
from gridsieve.services.encoder.tower.tower import Slice, Tower, separated

# Answers of a rank. DONE: its tower is loaded, or its share is encoded and its embeddings follow. Any other answer is
# the text of an error.
DONE = b""
NO_MEMORY = b"its device has no memory left"

log = structlog.get_logger()

S = TypeVar("S", bound=Slice)


class Others(Protocol):
    """The part of `gridsieve.common.ranks.Ranks` that rank 0 uses."""

    def send(self, rank: int, message: bytes) -> None: ...

    def receive(self, rank: int, within_s: float) -> bytes: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """Slices for another rank. indices: of these slices. order: announces them. frames: as sent. embeds: receives
    their embeddings."""

    rank: int
    indices: Sequence[int]
    order: bytes
    frames: Tensor
    embeds: Tensor


class OutOfStep(Exception):
    """Communication with a rank failed: its next message could belong to this forward or to the next one."""


class ParallelTower(ABC):
    """own: the tower of rank 0, this process. others: the other ranks, which `exchange` reaches.

    count: how many share the slices of a forward. max_tokens: of one forward of one rank. rank_failure: recorded when
    one of them ends.
    """

    def __init__(
        self, own: Tower, others: Others, count: int, exchange: Exchange, max_tokens: int, rank_failure: RankFailure
    ) -> None:
        self.own = own
        self.rank_failure = rank_failure
        self._others = others
        self.count = count
        self._exchange = exchange
        self._packing = packing_of(own, max_tokens)

    @property
    def packing(self) -> PackingLimit:
        """The limit of a forward of all ranks."""
        largest = Size(*(each * self.count for each in astuple(self._packing.largest)))
        return PackingLimit(largest, self._packing.size_of)

    @property
    def failure(self) -> Unavailable:
        """The error that callers get once a rank has ended."""
        return Unavailable(f"the tower of the encoder has ended: {self.rank_failure.cause}", "encoder")

    def encode(self, slices: Sequence[Slice], adapter: bytes = b"") -> list[Tensor]:
        """See `Tower.encode`; on the device of rank 0. Raises Unavailable once a rank has ended."""
        sounds, frames = separated(slices)
        if self.rank_failure.cause is None:
            try:
                with torch.inference_mode():
                    if sounds:
                        return [
                            each for forward in _forwards(sounds, self._packing) for each in self.own.encode(forward)
                        ]
                    return self._encode(frames, adapter)
            except OutOfStep:
                if not self.rank_failure.wait():
                    log.exception("the ranks are out of step")
                    self._others.kill()
                    self.rank_failure.wait()
        raise self.failure

    @abstractmethod
    def _encode(self, slices: Sequence[Frames], adapter: bytes) -> list[Tensor]:
        """Raises OutOfStep if the ranks can encode no other forward."""


class DataParallelTower(ParallelTower):
    """count ranks, of which each has the whole tower."""

    def _encode(self, slices: Sequence[Frames], adapter: bytes) -> list[Tensor]:
        if self.count == 1:
            return self.own.encode(slices, adapter)
        tokens = [self.own.patches.tokens(frames.shape) for frames in slices]
        costs = [self.own.cost(frames.shape) for frames in slices]
        # Each share is in the order of the slices, where slices of equal size are neighbours.
        mine, *theirs = assign(costs, self.count)
        shares = [self._share(rank, own, slices, tokens, adapter) for rank, own in enumerate(theirs, start=1) if own]
        sent = [self._send(share) for share in shares]
        failures: list[Exception] = []
        found = empty_embeds(self.own, 0)
        try:
            found = encode_share(self.own, [slices[each] for each in mine], self._packing, adapter)
        except torch.AcceleratorError:  # the device cannot receive embeddings either
            raise
        except Exception as error:  # raised after all ranks have answered, so that they stay in step
            failures.append(error)
        for share, work in zip(shares, sent, strict=True):
            failures += self._collect(share, work)
        if failures:
            raise failures.pop(0)  # popped: its traceback holds this frame, and would form a cycle with `failures`
        return _in_order([(mine, found), *((share.indices, share.embeds) for share in shares)], tokens)

    def _share(
        self, rank: int, indices: Sequence[int], slices: Sequence[Frames], tokens: Sequence[int], adapter: bytes
    ) -> _Share:
        """Allocates all memory first: an error after the rank received its share would leave the ranks out of step."""
        own, room = [slices[each] for each in indices], empty_embeds(self.own, sum(tokens[each] for each in indices))
        return _Share(rank, indices, announced(own, adapter), packed(own, self.own.device), room)

    def _send(self, share: _Share) -> Any:
        with _in_step():
            self._others.send(share.rank, share.order)
            return self._exchange.send(share.frames, share.rank)

    def _collect(self, share: _Share, work: Any) -> list[Exception]:
        """Receives the embeddings of a share, or returns the rank's error."""
        with _in_step():
            work.wait()
            answer = self._others.receive(share.rank, TIMEOUT.total_seconds())
            if answer == DONE:
                self._exchange.receive(share.embeds, share.rank)
        if answer == DONE:
            return []
        failure = torch.OutOfMemoryError if answer == NO_MEMORY else RuntimeError
        return [failure(f"rank {share.rank}: {answer.decode()}")]


def packing_of(tower: Tower, max_tokens: int) -> PackingLimit:
    """The limit of one forward of the tower: its own, or `max_tokens` tokens, of which sounds have one for as many rows
    as a token has patches."""
    pictures = tower.packing or PackingLimit(
        token_limit(max_tokens), lambda frames: Size(load := tower.patches.load(frames.shape), 1, 0, load)
    )
    sound = tower.sound
    if sound is None:
        return pictures

    def size_of(each: Slice) -> Size:
        if not isinstance(each, Sound):
            return pictures.size_of(each)
        load = -(-sound.rows_of(each.frames) // tower.patches.merge**2)
        return Size(load, 1, 0, load)

    return PackingLimit(pictures.largest, size_of)


def encode_share(tower: Tower, slices: Sequence[Frames], packing: PackingLimit, adapter: bytes = b"") -> Tensor:
    """Embeddings of the slices, concatenated, (1 + levels, tokens, D).

    Takes as many forwards as needed: shares have equal costs, not equal numbers of tokens.
    """
    embeds = [each for forward in _forwards(slices, packing) for each in tower.encode(forward, adapter)]
    return torch.cat(embeds, dim=1) if embeds else empty_embeds(tower, 0)


def empty_embeds(tower: Tower, tokens: int) -> Tensor:
    """An uninitialised buffer for embeddings of so many tokens, on the tower's device."""
    width = tower.features or tower.embed_dim
    return torch.empty((1 + tower.embed_levels, tokens, width), dtype=tower.dtype, device=tower.device)


def _forwards(slices: Sequence[S], packing: PackingLimit) -> Iterator[Sequence[S]]:
    while slices:
        count = fitting((packing.size_of(each) for each in slices), packing.largest)
        yield slices[:count]
        slices = slices[count:]


@contextmanager
def _in_step() -> Iterator[None]:
    """Turns errors of communication with a rank into OutOfStep."""
    try:
        yield
    except torch.AcceleratorError:
        raise
    except (OSError, RuntimeError) as error:
        raise OutOfStep from error


def _in_order(shares: Sequence[tuple[Sequence[int], Tensor]], tokens: Sequence[int]) -> list[Tensor]:
    """Each slice's embeddings. shares: indices of slices, and their embeddings, (1 + levels, their tokens, D)."""
    found = {
        each: embeds
        for indices, all_embeds in shares
        for each, embeds in zip(indices, all_embeds.split([tokens[i] for i in indices], dim=1), strict=True)
    }
    return [found[each] for each in range(len(tokens))]
