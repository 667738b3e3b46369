"""A tower of several ranks encodes as one does, and fails as one does; a rank that ends takes all of it along.

Ranks are threads here, in groups of gloo's own; processes are `integration/test_encoder_ranks.py`'s.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common import ranks
from common.checkpoint import Checkpoint
from common.errors import StartupError, Unavailable
from common.exit_status import ExitStatus
from services.encoder.budgets import Packing, Size
from services.encoder.families import load_tower
from services.encoder.loading import device_of
from services.encoder.parallel.assignment import assign
from services.encoder.parallel.exchange import Exchange
from services.encoder.parallel.loss import Loss
from services.encoder.parallel.rank import run_shares
from services.encoder.parallel.tower import DataParallelTower
from services.encoder.settings import EncoderSettings
from services.encoder.tower import Tower
from tests.unit.meeting import ended_by_a_signal

TIMEOUT_S = 20
TOLERANCE = 1e-5


class ThreadRanks:
    """In place of processes. told: all that they have been, by rank; towers: of each, by rank."""

    def __init__(self, count: int, tower: Tower, rank_tokens: int, loss: Loss) -> None:
        self.told: dict[int, list[bytes]] = {rank: [] for rank in range(1, count)}
        self.towers = {rank: RecordingTower(tower) for rank in self.told}
        self._count, self._rank_tokens, self._loss = count, rank_tokens, loss
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
        raise AssertionError("all ends are known")

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
            self._loss.note(f"rank {rank} of {self._count} was ended by signal 9")


class Killed(BaseException):
    pass


class RecordingTower:
    """A tower that remembers the shapes in each of its forwards, before which it does what it is told to do instead."""

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
Ranks: TypeAlias = Callable[..., Made]


@pytest.fixture(scope="module")
def tower(family_checkpoint: Path) -> Tower:
    torch.set_num_threads(1)
    return load_tower(Checkpoint(family_checkpoint), "float32", torch.device("cpu"))


@pytest.fixture(scope="module")
def ranks_of(tower: Tower) -> Iterator[Ranks]:
    """Makes a tower of so many ranks."""
    made: list[ThreadRanks] = []

    def make(count: int, rank_tokens: int = 10_000, own: Tower = tower) -> Made:
        loss = Loss()
        loss.watch(lambda: None)
        others = ThreadRanks(count, own, rank_tokens, loss)
        made.append(others)
        recording = cast(Tower, RecordingTower(own))
        return DataParallelTower(recording, others, count, Exchange(others.group(0)), rank_tokens, loss), others

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def two(ranks_of: Ranks) -> Made:
    return ranks_of(2)


@pytest.fixture(scope="module")
def four(ranks_of: Ranks) -> Made:
    return ranks_of(4)


def slices_of(tower: Tower, *sizes: tuple[int, int, int]) -> list[Tensor]:
    """Random frames: so many of each slice, so many tokens high and wide."""
    random, side_px = torch.Generator().manual_seed(len(sizes)), tower.patches.token_px
    shapes = [(frames, rows * side_px, columns * side_px, 3) for frames, rows, columns in sizes]
    return [torch.randint(0, 256, shape, dtype=torch.uint8, generator=random) for shape in shapes]


def check_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


# --- the same embeddings ----------------------------------------------------------------------------------------

CASES = {
    "a video": [(2, 4, 4)] * 7,
    "an image": [(1, 5, 3)],
    "images": [(1, 5, 3), (1, 2, 2), (1, 8, 8)],
    "a slice short of frames": [(2, 3, 3), (2, 3, 3), (1, 3, 3)],
    "videos and images": [(2, 4, 4), (2, 4, 4), (1, 2, 7), (2, 6, 2), (2, 6, 2), (2, 6, 2), (1, 1, 1), (2, 4, 4)],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", ["two", "four"])
def test_ranks_encode_as_one_process_does(tower: Tower, request: pytest.FixtureRequest, count: str, case: str) -> None:
    towers, _ = request.getfixturevalue(count)
    slices = slices_of(tower, *CASES[case])
    check_equal(towers.encode(slices), tower.encode(slices))


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=9))
def test_any_slices_come_back_in_their_order(tower: Tower, four: Made, sizes: list[tuple[int, int, int]]) -> None:
    slices = slices_of(tower, *sizes)
    check_equal(four[0].encode(slices), [tower.encode([each])[0] for each in slices])


def test_each_rank_runs_what_is_assigned_to_it(tower: Tower, ranks_of: Ranks) -> None:
    towers, others = ranks_of(2)
    # The first costs more than two of half its tokens, so that the last is not its rank's.
    slices = slices_of(tower, (2, 8, 8), (2, 2, 5), (2, 4, 8), (2, 8, 4))
    towers.encode(slices)
    shares = assign([tower.cost(tokens) for tokens in (64, 10, 32, 32)], 2).shares
    assert shares == [[0], [2, 3, 1]]
    assert ran(towers, others) == [[[tuple(slices[i].shape) for i in sorted(share)]] for share in shares]


def ran(towers: DataParallelTower, others: ThreadRanks) -> list[list[list[tuple[int, ...]]]]:
    """The shapes of all slices, by rank and forward."""
    return [each.forwards for each in (cast(Any, towers.own), *others.towers.values())]


def test_a_rank_without_a_share_is_told_nothing(tower: Tower, ranks_of: Ranks) -> None:
    towers, others = ranks_of(2)
    (alone,) = slices_of(tower, (2, 3, 3))
    check_equal(towers.encode([alone]), tower.encode([alone]))
    assert others.told[1] == []
    check_equal(towers.encode([alone, alone]), tower.encode([alone, alone]))  # and is there when there is something
    assert len(others.told[1]) == 1


def test_each_rank_keeps_to_the_budget_of_one_forward(tower: Tower, ranks_of: Ranks) -> None:
    towers, others = ranks_of(2, rank_tokens=40)
    assert towers.budget_tokens == towers.packing.largest.tokens == 80
    slices = slices_of(tower, *[(2, 4, 4)] * 8, (2, 7, 7), *[(2, 2, 3)] * 3)
    check_equal(towers.encode(slices), tower.encode(slices))
    forwards = [forward for of_rank in ran(towers, others) for forward in of_rank]
    assert sum(map(len, forwards)) == len(slices)
    for forward in forwards:
        tokens = [tower.patches.tokens(shape) for shape in forward]
        assert sum(tokens) <= 40 or tokens == [49]
    assert len(forwards) < len(slices)


def test_a_towers_own_packing_holds_on_each_rank_and_is_as_much_more_for_all(tower: Tower, ranks_of: Ranks) -> None:
    packing = Packing(Size(100, 2, 5), lambda frames: Size(tower.patches.tokens(frames), 1, 2))
    towers, others = ranks_of(3, own=replace(tower, packing=packing))
    assert towers.packing == Packing(Size(300, 6, 15), packing.size_of)
    slices = slices_of(tower, *[(2, 2, 2)] * 9)
    check_equal(towers.encode(slices), tower.encode(slices))
    assert [[len(forward) for forward in of_rank] for of_rank in ran(towers, others)] == [[2, 1]] * 3


def test_embeddings_come_back_in_the_towers_own_dtype(family_checkpoint: Path, ranks_of: Ranks) -> None:
    half = load_tower(Checkpoint(family_checkpoint), "bfloat16", torch.device("cpu"))
    towers, _ = ranks_of(2, own=half)
    slices = slices_of(half, (2, 2, 2), (2, 2, 2), (1, 3, 2))
    for found, expected in zip(towers.encode(slices), (half.encode([each])[0] for each in slices), strict=True):
        assert torch.equal(found, expected)
        assert found.dtype == torch.bfloat16


# --- failures ---------------------------------------------------------------------------------------------------


def fail() -> None:
    raise torch.OutOfMemoryError("the device has no memory left")


@pytest.mark.parametrize("who", ["rank 0", "rank 1"])
def test_a_forward_that_fails_on_one_rank_fails_and_the_next_one_does_not(
    tower: Tower, ranks_of: Ranks, who: str
) -> None:
    towers, others = ranks_of(2)
    failing: Any = towers.own if who == "rank 0" else others.towers[1]
    slices = slices_of(tower, (2, 3, 3), (2, 2, 2), (2, 3, 3))
    for _ in range(2):
        failing.instead.append(fail)
        with pytest.raises(RuntimeError, match="the device has no memory left"):
            towers.encode(slices)
        check_equal(towers.encode(slices), tower.encode(slices))
    assert towers.loss.lost is None


def end() -> None:
    raise Killed


def test_a_rank_that_ends_in_its_forward_ends_the_tower_and_is_named(tower: Tower, ranks_of: Ranks) -> None:
    towers, others = ranks_of(3)
    slices = slices_of(tower, (2, 3, 3), (2, 3, 3), (2, 3, 3))
    others.towers[2].instead.append(end)
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"has ended: rank 2 of 3 was ended by signal 9$") as failed:
            towers.encode(slices)
        assert failed.value.stage == "encoder"
    assert [len(told) for told in others.told.values()] == [1, 1]


def test_a_rank_that_ends_while_it_sends_ends_the_tower(
    tower: Tower, ranks_of: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has said that its embeddings come, and they do not."""
    towers, _ = ranks_of(2)
    send = Exchange.send

    def break_off(exchange: Exchange, tensor: Tensor, to: int) -> Any:
        if to != 0:
            return send(exchange, tensor, to)
        del exchange._group  # which closes its connections
        raise Killed

    monkeypatch.setattr(Exchange, "send", break_off)
    with pytest.raises(Unavailable, match=r"has ended: rank 1 of 2 was ended by signal 9$"):
        towers.encode(slices_of(tower, (2, 3, 3), (2, 3, 3)))


def test_ranks_that_cannot_be_reached_are_ended_and_never_asked_again(
    tower: Tower, ranks_of: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them run, and what one has said is lost: whatever came next would be taken for that."""
    towers, others = ranks_of(2)
    receive = Exchange.receive

    def lose(exchange: Exchange, tensor: Tensor, rank: int) -> Tensor:
        found = receive(exchange, tensor, rank)
        if rank != 0:
            raise RuntimeError("it took too long")
        return found

    monkeypatch.setattr(Exchange, "receive", lose)
    monkeypatch.setattr("services.encoder.parallel.loss._KNOWN_S", 0.05)
    monkeypatch.setattr(others, "kill", lambda: others._loss.note("rank 1 of 2 was ended by signal 9"))
    for _ in range(2):
        with pytest.raises(Unavailable, match="has ended: rank 1 of 2 was ended by signal 9"):
            towers.encode(slices_of(tower, (2, 3, 3), (2, 3, 3)))
    assert len(others.told[1]) == 1


def test_a_rank_that_stands_still_in_its_forward_is_ended(
    tower: Tower, ranks_of: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    towers, others = ranks_of(2)
    killed = threading.Event()

    def stand_still() -> None:
        assert killed.wait(TIMEOUT_S)
        raise Killed

    others.towers[1].instead.append(stand_still)
    monkeypatch.setattr("services.encoder.parallel.tower.TIMEOUT", timedelta(seconds=0.1))
    monkeypatch.setattr("services.encoder.parallel.loss._KNOWN_S", 0.05)

    def kill() -> None:
        killed.set()
        others._loss.note("rank 1 of 2 was ended by signal 9")

    monkeypatch.setattr(others, "kill", kill)
    with pytest.raises(Unavailable, match="has ended: rank 1 of 2 was ended by signal 9"):
        towers.encode(slices_of(tower, (2, 3, 3), (2, 3, 3)))


def test_a_rank_that_has_ended_is_not_asked(tower: Tower, ranks_of: Ranks) -> None:
    towers, others = ranks_of(2)
    others._loss.note("rank 1 of 2 ended with status 7")
    with pytest.raises(Unavailable, match="ended with status 7"):
        towers.encode(slices_of(tower, (2, 3, 3), (2, 3, 3)))
    assert others.told[1] == []


def test_a_rank_that_ends_before_the_service_serves_ends_it_as_one_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        Loss().note("rank 1 of 2 ended with status 2")
    assert ended.value.code == ExitStatus.CANNOT_START


def test_a_signal_ends_a_service_whose_ranks_have_yet_to_meet(tmp_path: Path) -> None:
    arguments = f"Path({str(tmp_path / 'meeting')!r}), 0, 2, torch.device('cpu')"
    assert ended_by_a_signal(f"from services.encoder.parallel.exchange import join\njoin({arguments})", tmp_path) == 7


# --- devices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "cards", "found"),
    [
        ("cpu", 0, ["cpu"] * 3),
        ("cuda", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda:2", 5, ["cuda:2", "cuda:3", "cuda:4"]),
        ("auto", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("auto", 0, ["cpu"] * 3),
        ("cuda", 2, "wants as many CUDA devices from cuda:0 on, there are 2 in all"),
        ("cuda:1", 3, "wants as many CUDA devices from cuda:1 on, there are 3 in all"),
    ],
)
def test_each_rank_has_a_card_of_its_own_where_there_are_cards(
    monkeypatch: pytest.MonkeyPatch, device: str, cards: int, found: list[str] | str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)  # nothing is on them
    told = EncoderSettings.load(["--device", device, "--data-parallel", "3"])
    if isinstance(found, str):
        with pytest.raises(StartupError, match=found):
            device_of(told, 0)
    else:
        assert [str(device_of(told, rank)) for rank in range(3)] == found
