"""A data-parallel tower encodes as one tower does, within the budget of each rank, and fails as a whole.

Ranks are threads here; `integration/test_encoder_ranks.py` runs processes.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.contract.errors import StartupError, Unavailable
from common.process import ExitStatus
from services.encoder.settings import EncoderSettings
from services.encoder.startup.build import device_of
from services.encoder.tower.graph_buckets import PackingLimit, Size
from services.encoder.tower.parallel.assignment import assign
from services.encoder.tower.parallel.exchange import Exchange
from services.encoder.tower.parallel.rank_failure import RankFailure
from services.encoder.tower.parallel.tower import DataParallelTower
from services.encoder.tower.tower import Tower
from tests.encoder.encoder_service import tower_of
from tests.encoder.meeting import ended_by_a_signal
from tests.encoder.thread_ranks import TIMEOUT_S, Killed, Made, ThreadRanks, check_equal, make_ranks, slices_of

MakeRanks = Callable[..., Made]
PAIR = ((2, 3, 3), (2, 3, 3))


@pytest.fixture(scope="module")
def make(tower: Tower) -> Iterator[MakeRanks]:
    """Makes a tower of so many ranks, which are closed at the end."""
    made: list[ThreadRanks] = []

    def make(count: int, own: Tower = tower, **options: int) -> Made:
        towers, others = make_ranks(count, own, **options)
        made.append(others)
        return towers, others

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def four(make: MakeRanks) -> Made:
    return make(4)


# --- encoding ---------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=9))
def test_any_slices_are_encoded_as_by_one_tower_and_keep_their_order(
    tower: Tower, four: Made, sizes: list[tuple[int, int, int]]
) -> None:
    slices = slices_of(tower, *sizes)
    check_equal(four[0].encode(slices), [tower.encode([each])[0] for each in slices])


def test_each_rank_encodes_its_assigned_slices(tower: Tower, make: MakeRanks) -> None:
    towers, others = make(2)
    # The first costs more than two slices of half its tokens.
    slices = slices_of(tower, (2, 8, 8), (2, 2, 5), (2, 4, 8), (2, 8, 4))
    towers.encode(slices)
    shares = assign([tower.cost(tokens) for tokens in (64, 10, 32, 32)], 2).shares
    assert shares == [[0], [2, 3, 1]]
    assert forwards_of(towers, others) == [[[tuple(slices[i].shape) for i in sorted(share)]] for share in shares]


def forwards_of(towers: DataParallelTower, others: ThreadRanks) -> list[list[list[tuple[int, ...]]]]:
    """The shapes of all slices, by rank and forward."""
    return [each.forwards for each in (cast(Any, towers.own), *others.towers.values())]


def test_a_rank_without_a_share_is_told_nothing(tower: Tower, make: MakeRanks) -> None:
    towers, others = make(2)
    (alone,) = slices_of(tower, (2, 3, 3))
    check_equal(towers.encode([alone]), tower.encode([alone]))
    assert others.told[1] == []
    check_equal(towers.encode([alone, alone]), tower.encode([alone, alone]))
    assert len(others.told[1]) == 1


def test_each_rank_keeps_to_the_budget_of_one_forward(tower: Tower, make: MakeRanks) -> None:
    towers, others = make(2, rank_tokens=40)
    assert towers.budget_tokens == towers.packing.largest.tokens == 80
    slices = slices_of(tower, *[(2, 4, 4)] * 8, (2, 7, 7), *[(2, 2, 3)] * 3)
    check_equal(towers.encode(slices), tower.encode(slices))
    forwards = [forward for of_rank in forwards_of(towers, others) for forward in of_rank]
    assert sum(map(len, forwards)) == len(slices)
    for forward in forwards:
        tokens = [tower.patches.tokens(shape) for shape in forward]
        assert sum(tokens) <= 40 or tokens == [49]
    assert len(forwards) < len(slices)


def test_the_packing_limit_of_a_tower_holds_on_each_rank(tower: Tower, make: MakeRanks) -> None:
    packing = PackingLimit(Size(100, 2, 5), lambda frames: Size(tower.patches.tokens(frames), 1, 2))
    towers, others = make(3, replace(tower, packing=packing))
    assert towers.packing == PackingLimit(Size(300, 6, 15), packing.size_of)
    slices = slices_of(tower, *[(2, 2, 2)] * 9)
    check_equal(towers.encode(slices), tower.encode(slices))
    assert [[len(forward) for forward in of_rank] for of_rank in forwards_of(towers, others)] == [[2, 1]] * 3


def test_embeddings_come_back_in_the_towers_dtype(levels_checkpoint: Path, make: MakeRanks) -> None:
    half = tower_of(levels_checkpoint, "bfloat16")
    towers, _ = make(2, half)
    slices = slices_of(half, (2, 2, 2), (2, 2, 2), (1, 3, 2))
    for found, expected in zip(towers.encode(slices), (half.encode([each])[0] for each in slices), strict=True):
        assert torch.equal(found, expected)
        assert found.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("device", "gpus", "found"),
    [
        ("cpu", 0, ["cpu"] * 3),
        ("cuda", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda:2", 5, ["cuda:2", "cuda:3", "cuda:4"]),
        ("auto", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("auto", 0, ["cpu"] * 3),
        ("cuda:1", 3, "wants as many CUDA devices from cuda:1 on, there are 3 in all"),
        ("abacus", 0, "--device abacus cannot be used: "),
    ],
)
def test_each_rank_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, found: list[str] | str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    settings = EncoderSettings.load(["--device", device, "--data-parallel", "3"])
    if isinstance(found, str):
        with pytest.raises(StartupError, match=found):
            device_of(settings, 0)
    else:
        assert [str(device_of(settings, rank)) for rank in range(3)] == found


# --- failures ---------------------------------------------------------------------------------------------------


def fail() -> None:
    raise RuntimeError("the tower fell")


def lack_memory() -> None:
    raise torch.OutOfMemoryError("none is left")


def end() -> None:
    raise Killed


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("how", [fail, lack_memory])
def test_a_forward_that_fails_on_one_rank_fails_and_the_next_one_succeeds(
    tower: Tower, make: MakeRanks, failing: int, how: Callable[[], None]
) -> None:
    """Out-of-memory stays OutOfMemoryError, so that the batcher runs the slices one at a time."""
    towers, others = make(2)
    rank: Any = others.towers[1] if failing else towers.own
    slices = slices_of(tower, (2, 3, 3), (2, 2, 2), (2, 3, 3))
    for _ in range(2):
        rank.instead.append(how)
        text = r"the tower fell$|none is left$|rank 1: its device has no memory left$"
        with pytest.raises(RuntimeError, match=text) as failed:
            towers.encode(slices)
        assert isinstance(failed.value, torch.OutOfMemoryError) == (how is lack_memory)
        check_equal(towers.encode(slices), tower.encode(slices))
    assert towers.rank_failure.cause is None


@pytest.mark.parametrize("failing", [0, 1])
def test_buffers_of_a_failed_forward_are_freed_at_once(tower: Tower, make: MakeRanks, failing: int) -> None:
    """Without the collector, so that its slices find memory when they run one at a time."""
    towers, others = make(2)
    rank: Any = others.towers[1] if failing else towers.own
    buffers: list[weakref.ref[Tensor]] = []
    share = towers._share

    def note(*args: Any) -> Any:
        made = share(*args)
        buffers.append(weakref.ref(made.embeds))
        return made

    towers._share = note  # type: ignore[method-assign]
    rank.instead.append(lack_memory)
    gc.disable()
    try:
        with suppress(torch.OutOfMemoryError):
            towers.encode(slices_of(tower, *PAIR))
        assert [buffer() for buffer in buffers] == [None]
    finally:
        gc.enable()


def test_a_rank_that_ends_while_it_encodes_ends_the_tower_and_is_named(tower: Tower, make: MakeRanks) -> None:
    towers, others = make(3)
    slices = slices_of(tower, *PAIR, (2, 3, 3))
    others.towers[2].instead.append(end)
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"has ended: rank 2 of 3 was ended by signal 9$") as failed:
            towers.encode(slices)
        assert failed.value.stage == "encoder"
    assert [len(told) for told in others.told.values()] == [1, 1]  # a failed tower asks no rank


def test_a_rank_that_ends_while_it_sends_ends_the_tower(
    tower: Tower, make: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    towers, _ = make(2)
    send = Exchange.send

    def break_off(exchange: Exchange, tensor: Tensor, to: int) -> Any:
        if to != 0:
            return send(exchange, tensor, to)
        del exchange._group  # which closes its connections
        raise Killed

    monkeypatch.setattr(Exchange, "send", break_off)
    with pytest.raises(Unavailable, match=r"has ended: rank 1 of 2 was ended by signal 9$"):
        towers.encode(slices_of(tower, *PAIR))


@pytest.mark.parametrize("how", ["a lost answer", "no answer"])
def test_a_rank_out_of_step_is_killed_and_never_asked_again(
    tower: Tower, make: MakeRanks, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    towers, others = make(2)
    killed, receive = threading.Event(), Exchange.receive

    def lose(exchange: Exchange, tensor: Tensor, rank: int) -> Tensor:
        found = receive(exchange, tensor, rank)
        if rank != 0:
            raise RuntimeError("it took too long")
        return found

    def hang() -> None:
        assert killed.wait(TIMEOUT_S)
        raise Killed

    def kill() -> None:
        killed.set()
        others.fail(1)

    if how == "a lost answer":
        monkeypatch.setattr(Exchange, "receive", lose)
    else:
        others.towers[1].instead.append(hang)
        monkeypatch.setattr("services.encoder.tower.parallel.tower.TIMEOUT", timedelta(seconds=0.1))
    monkeypatch.setattr("services.encoder.tower.parallel.rank_failure._REPORTED_WITHIN_S", 0.05)
    monkeypatch.setattr(others, "kill", kill)
    for _ in range(2):
        with pytest.raises(Unavailable, match="has ended: rank 1 of 2 was ended by signal 9"):
            towers.encode(slices_of(tower, *PAIR))
    assert len(others.told[1]) == 1


def test_a_rank_that_ends_before_the_service_serves_ends_it_as_one_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        RankFailure().record("rank 1 of 2 ended with status 2")
    assert ended.value.code == ExitStatus.CANNOT_START


def test_a_signal_ends_a_service_that_waits_for_its_ranks_to_join(tmp_path: Path) -> None:
    arguments = f"Path({str(tmp_path / 'meeting')!r}), 0, 2, torch.device('cpu')"
    join = f"from services.encoder.tower.parallel.exchange import join\njoin({arguments})"
    assert ended_by_a_signal(join, tmp_path) == 7
