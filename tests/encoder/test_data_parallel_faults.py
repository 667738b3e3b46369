"""A tower of several ranks fails as one does, and a rank that ends, or stands still, takes all of it along.

Ranks are threads here; processes are `integration/test_encoder_ranks.py`'s.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.contract.errors import Unavailable
from common.process import ExitStatus
from services.encoder.tower.parallel.exchange import Exchange
from services.encoder.tower.parallel.rank_failure import Loss
from services.encoder.tower.tower import Tower
from tests.encoder.meeting import ended_by_a_signal
from tests.encoder.thread_ranks import TIMEOUT_S, Killed, Ranks, check_equal, slices_of

pytest_plugins = ["tests.encoder.thread_ranks_fixtures"]


def fail() -> None:
    raise RuntimeError("the tower fell")


def lack_memory() -> None:
    raise torch.OutOfMemoryError("none is left")


@pytest.mark.parametrize("who", ["rank 0", "rank 1"])
@pytest.mark.parametrize("how", [fail, lack_memory])
def test_a_forward_that_fails_on_one_rank_fails_and_the_next_one_does_not(
    tower: Tower, ranks_of: Ranks, who: str, how: Callable[[], None]
) -> None:
    """Without memory it fails as one process's does, so that its slices are run one at a time."""
    towers, others = ranks_of(2)
    failing: Any = towers.own if who == "rank 0" else others.towers[1]
    slices = slices_of(tower, (2, 3, 3), (2, 2, 2), (2, 3, 3))
    for _ in range(2):
        failing.instead.append(how)
        with pytest.raises(
            RuntimeError, match=r"the tower fell$|none is left$|rank 1: its device has no memory left$"
        ) as failed:
            towers.encode(slices)
        assert isinstance(failed.value, torch.OutOfMemoryError) == (how is lack_memory)
        check_equal(towers.encode(slices), tower.encode(slices))
    assert towers.loss.lost is None


@pytest.mark.parametrize("who", ["rank 0", "rank 1"])
def test_what_was_made_for_a_forward_that_fails_is_not_held(tower: Tower, ranks_of: Ranks, who: str) -> None:
    """So that its slices find that memory when they are run one at a time; it does not take the collector."""
    towers, others = ranks_of(2)
    failing: Any = towers.own if who == "rank 0" else others.towers[1]
    rooms: list[weakref.ref[Tensor]] = []
    errand = towers._errand

    def note(*args: Any) -> Any:
        made = errand(*args)
        rooms.append(weakref.ref(made.embeds))
        return made

    towers._errand = note  # type: ignore[method-assign]
    failing.instead.append(lack_memory)
    gc.disable()
    try:
        with suppress(torch.OutOfMemoryError):
            towers.encode(slices_of(tower, (2, 3, 3), (2, 3, 3)))
        assert [room() for room in rooms] == [None]
    finally:
        gc.enable()


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
    monkeypatch.setattr("services.encoder.tower.parallel.rank_failure._KNOWN_S", 0.05)
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
    monkeypatch.setattr("services.encoder.tower.parallel.tower.TIMEOUT", timedelta(seconds=0.1))
    monkeypatch.setattr("services.encoder.tower.parallel.rank_failure._KNOWN_S", 0.05)

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
    assert (
        ended_by_a_signal(f"from services.encoder.tower.parallel.exchange import join\njoin({arguments})", tmp_path)
        == 7
    )
