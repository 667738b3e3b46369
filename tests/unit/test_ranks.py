"""Ranks do what their service tells them, and neither outlives the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import Queue

import pytest

from common.ranks import Ranks

STAND_IN = "tests.unit.rank_stand_in"


@pytest.fixture
def lost() -> Queue[str]:
    return Queue()


@pytest.fixture
def ranks(tmp_path: Path, lost: Queue[str]) -> Iterator[Ranks]:
    ranks = Ranks(STAND_IN, 3, {"folder": str(tmp_path)}, lost.put)
    yield ranks
    with suppress(OSError):
        ranks.close()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def noted(folder: Path, rank: int) -> list[str]:
    path = folder / f"rank-{rank}-of-3"
    return path.read_text().splitlines()[1:] if path.exists() else []


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


def test_all_are_told_all_in_order_and_end_when_nothing_more_comes(ranks: Ranks, tmp_path: Path) -> None:
    large = b"x" * 3_000_000
    for message in (b"one", b"", large, b"two"):
        ranks.tell(message)
    ranks.close()
    for rank in (1, 2):
        assert noted(tmp_path, rank) == ["3 one", "0 ", f"3000000 {'x' * 20}", "3 two", "the end"]
    assert not any(map(runs, ranks.pids))


def test_one_alone_is_told_and_heard(ranks: Ranks, tmp_path: Path) -> None:
    large = b"answer" * 500_000
    ranks.tell_one(2, b"answer")
    ranks.tell_one(1, large)
    assert (ranks.hear(1), ranks.hear(2)) == (large, b"answeranswer")
    ranks.close()
    assert noted(tmp_path, 1) == [f"3000000 {large[:20].decode()}", "the end"]
    assert noted(tmp_path, 2) == ["6 answer", "the end"]


def test_a_rank_that_ends_is_not_waited_for(ranks: Ranks, lost: Queue[str]) -> None:
    ranks.tell_one(1, b"leave")
    with pytest.raises(ConnectionResetError):
        ranks.hear(1)
    assert lost.get(timeout=20) == "rank 1 of 3 ended with status 7"
    ranks.kill()
    with pytest.raises(ConnectionResetError):
        ranks.hear(2)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda ranks: os.kill(ranks.pids[1], signal.SIGKILL), "rank 2 of 3 was ended by signal 9"),
        (lambda ranks: ranks._ranks[0].tell(b"leave"), "rank 1 of 3 ended with status 7"),
    ],
)
def test_a_rank_that_ends_unasked_is_told(
    ranks: Ranks, lost: Queue[str], tmp_path: Path, end: Callable[[Ranks], None], how: str
) -> None:
    ranks.tell(b"begun")
    until(lambda: noted(tmp_path, 1) and noted(tmp_path, 2))
    end(ranks)
    assert lost.get(timeout=20) == how
    with pytest.raises(OSError, match="Broken pipe"):
        ranks.tell(b"more")


def test_ranks_that_end_as_they_are_told_to_are_not_lost(ranks: Ranks, lost: Queue[str], tmp_path: Path) -> None:
    ranks.tell(b"begun")
    until(lambda: noted(tmp_path, 1) and noted(tmp_path, 2))
    ranks.close()
    assert lost.empty()


def test_signals_that_a_service_drains_on_do_not_end_its_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks.tell(b"begun")
    until(lambda: noted(tmp_path, 1) and noted(tmp_path, 2))
    for pid in ranks.pids:
        assert os.getsid(pid) != os.getsid(0)
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    ranks.tell(b"more")
    ranks.close()
    assert noted(tmp_path, 1) == noted(tmp_path, 2) == ["5 begun", "4 more", "the end"]


def test_a_rank_that_is_busy_ends_with_its_service(tmp_path: Path) -> None:
    """It is in the middle of something, and learns nothing from its socket."""
    program = f"""
import time
from common.ranks import Ranks
Ranks({STAND_IN!r}, 3, {{"folder": {str(tmp_path)!r}}}, print).tell(b"hang")
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program]) as service:
        until(lambda: noted(tmp_path, 1) and noted(tmp_path, 2))
        pids = [int((tmp_path / f"rank-{rank}-of-3").read_text().split()[0]) for rank in (1, 2)]
        assert all(map(runs, pids))
        service.kill()
    until(lambda: not any(map(runs, pids)))
