"""Ranks of a data-parallel tower as threads, with gloo groups of their own, which record what they are told and run."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from common import ranks
from services.encoder.startup.rank import run_shares
from services.encoder.tower.parallel.exchange import Exchange
from services.encoder.tower.parallel.rank_failure import RankFailure
from services.encoder.tower.parallel.tower import DataParallelTower
from services.encoder.tower.tower import Tower

TIMEOUT_S = 20


class Killed(BaseException):
    """Ends a thread rank as a signal ends a process."""


class ThreadRanks:
    """Takes the place of `common.ranks.Ranks`. told: all messages, by rank. towers: of each rank."""

    def __init__(self, count: int, tower: Tower, rank_tokens: int, rank_failure: RankFailure) -> None:
        self.told: dict[int, list[bytes]] = {rank: [] for rank in range(1, count)}
        self.towers = {rank: RecordingTower(tower) for rank in self.told}
        self._count, self._rank_tokens, self._rank_failure = count, rank_tokens, rank_failure
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        self._pairs = {rank: socket.socketpair() for rank in self.told}
        self._threads = [threading.Thread(target=self._run, args=(rank,)) for rank in self.told]
        for each in self._threads:
            each.start()

    def group(self, rank: int) -> Any:
        return dist.ProcessGroupGloo(self._store, rank, self._count, timedelta(seconds=TIMEOUT_S))

    def tell_one(self, rank: int, message: bytes) -> None:
        self.told[rank].append(message)
        ranks._send(self._pairs[rank][0], message)

    def hear(self, rank: int, within_s: float) -> bytes:
        self._pairs[rank][0].settimeout(within_s)
        heard = ranks._receive(self._pairs[rank][0])
        if heard is None:
            raise ConnectionResetError
        return heard

    def kill(self) -> None:
        raise AssertionError("only a test that expects it replaces this")

    def fail(self, rank: int) -> None:
        self._rank_failure.record(f"rank {rank} of {self._count} was ended by signal 9")

    def close(self) -> None:
        for ours, _ in self._pairs.values():
            with suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
        for each in self._threads:
            each.join(TIMEOUT_S)
            assert not each.is_alive()
        for pair in self._pairs.values():
            for each_end in pair:
                each_end.close()

    def _run(self, rank: int) -> None:
        theirs = self._pairs[rank][1]
        orders = SimpleNamespace(receive=partial(ranks._receive, theirs), answer=partial(ranks._send, theirs))
        try:
            run_shares(cast(Any, orders), cast(Tower, self.towers[rank]), Exchange(self.group(rank)), self._rank_tokens)
        except Killed:
            theirs.shutdown(socket.SHUT_RDWR)
            self.fail(rank)


class RecordingTower:
    """A tower that records the shapes of each forward. instead: functions called before the next forwards."""

    def __init__(self, tower: Tower) -> None:
        self._tower = tower
        self.forwards: list[list[tuple[int, ...]]] = []
        self.instead: list[Callable[[], None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tower, name)

    def encode(self, slices: Sequence[Tensor]) -> list[Tensor]:
        self.forwards.append([tuple(frames.shape) for frames in slices])
        if self.instead:
            self.instead.pop()()
        return self._tower.encode(slices)


Made: TypeAlias = tuple[DataParallelTower, ThreadRanks]


def make_ranks(count: int, own: Tower, rank_tokens: int = 10_000) -> Made:
    """A data-parallel tower of `count` ranks; the caller closes the ranks."""
    rank_failure = RankFailure()
    rank_failure.watch(lambda: None)
    others = ThreadRanks(count, own, rank_tokens, rank_failure)
    recording = cast(Tower, RecordingTower(own))
    return DataParallelTower(recording, others, count, Exchange(others.group(0)), rank_tokens, rank_failure), others


def slices_of(tower: Tower, *sizes: tuple[int, int, int]) -> list[Tensor]:
    """Random slices. sizes: frames, rows and columns of tokens of each."""
    random, side_px = torch.Generator().manual_seed(len(sizes)), tower.patches.token_px
    shapes = [(frames, rows * side_px, columns * side_px, 3) for frames, rows, columns in sizes]
    return [torch.randint(0, 256, shape, dtype=torch.uint8, generator=random) for shape in shapes]


def check_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
