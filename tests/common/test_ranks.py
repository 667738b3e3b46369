"""Ranks receive what their service sends, and end with it."""

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

from gridsieve.common import ranks as rank_processes
from gridsieve.common.ranks import Ranks
from tests.awake import awake
from tests.processes import runs

STAND_IN = "tests.encoder.rank_stand_in"


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
        assert time.monotonic() < end, "the condition never held"
        time.sleep(0.01)


def noted(folder: Path, rank: int) -> list[str]:
    path = folder / f"rank-{rank}-of-3"
    return path.read_text().splitlines()[1:] if path.exists() else []


def test_every_rank_receives_every_message_in_order_and_ends_with_the_connection(
    ranks: Ranks, lost: Queue[str], tmp_path: Path
) -> None:
    large = b"x" * 3_000_000
    for message in (b"one", b"", large):
        ranks.broadcast(message)
    ranks.send(2, b"answer")
    assert ranks.receive(2) == b"answeranswer"
    ranks.close()
    assert noted(tmp_path, 1) == ["3 one", "0 ", f"3000000 {'x' * 20}", "the end"]
    assert noted(tmp_path, 2) == ["3 one", "0 ", f"3000000 {'x' * 20}", "6 answer", "the end"]
    assert not any(map(runs, ranks.pids))
    assert lost.empty()


def test_receiving_from_a_blocked_rank_times_out_and_from_one_that_ends_raises(ranks: Ranks, lost: Queue[str]) -> None:
    ranks.send(1, b"hang")
    with pytest.raises(TimeoutError):
        ranks.receive(1, 0.05)
    ranks.send(2, b"answer")
    assert ranks.receive(2, 20) == b"answeranswer"
    ranks.send(2, b"leave")
    with pytest.raises(ConnectionResetError):
        ranks.receive(2)
    ranks.kill()


def test_busy_ranks_are_killed_after_one_timeout_for_all(
    tmp_path: Path, lost: Queue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "_EXIT_S", 1.0)
    ranks = Ranks(STAND_IN, 4, {"folder": str(tmp_path)}, lost.put)
    ranks.broadcast(b"hang")
    until(lambda: all((tmp_path / f"rank-{rank}-of-4").exists() for rank in range(1, 4)))
    begun = time.monotonic()
    with awake() as passed_s:
        ranks.close()
        assert passed_s() < 2
    assert time.monotonic() - begun >= 1
    assert not any(map(runs, ranks.pids))
    assert lost.empty()


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda ranks: os.kill(ranks.pids[1], signal.SIGKILL), "rank 2 of 3 was ended by signal 9"),
        (lambda ranks: ranks._ranks[0].send(b"leave"), "rank 1 of 3 ended with status 7"),
    ],
)
def test_a_rank_that_ends_unexpectedly_is_reported(
    ranks: Ranks, lost: Queue[str], tmp_path: Path, end: Callable[[Ranks], None], how: str
) -> None:
    ranks.broadcast(b"begun")
    until(lambda: noted(tmp_path, 1) and noted(tmp_path, 2))
    end(ranks)
    assert lost.get(timeout=20) == how
    with pytest.raises(OSError, match="Broken pipe"):
        ranks.broadcast(b"more")


def test_ranks_ignore_the_signals_on_which_a_service_drains(ranks: Ranks, tmp_path: Path) -> None:
    ranks.broadcast(b"begun")
    until(lambda: noted(tmp_path, 1) and noted(tmp_path, 2))
    for pid in ranks.pids:
        assert os.getsid(pid) != os.getsid(0)
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    ranks.broadcast(b"more")
    ranks.close()
    assert noted(tmp_path, 1) == noted(tmp_path, 2) == ["5 begun", "4 more", "the end"]


def test_a_busy_rank_ends_with_its_service(tmp_path: Path) -> None:
    """It does not read from its socket meanwhile."""
    program = f"""
import time
from gridsieve.common.ranks import Ranks
Ranks({STAND_IN!r}, 3, {{"folder": {str(tmp_path)!r}}}, print).broadcast(b"hang")
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program]) as service:
        until(lambda: noted(tmp_path, 1) and noted(tmp_path, 2))
        pids = [int((tmp_path / f"rank-{rank}-of-3").read_text().split()[0]) for rank in (1, 2)]
        assert all(map(runs, pids))
        service.kill()
    until(lambda: not any(map(runs, pids)))


def test_ranks_that_start_while_their_service_ends_end_as_well(tmp_path: Path) -> None:
    """Their messages are sent, and another process adopts them."""
    program = f"""
import os
from gridsieve.common.ranks import Ranks
ranks = Ranks({STAND_IN!r}, 3, {{"folder": {str(tmp_path)!r}}}, print)
ranks.broadcast(b"hang")
print(*ranks.pids, flush=True)
os._exit(0)
"""
    told = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout
    pids = [int(pid) for pid in told.split()]
    assert len(pids) == 2
    until(lambda: not any(map(runs, pids)))


def test_ranks_do_not_import_from_the_working_directory_if_their_service_does_not(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    program = f"""
from gridsieve.common.ranks import Ranks
ranks = Ranks({STAND_IN!r}, 2, {{"folder": {str(tmp_path)!r}}}, print)
ranks.send(1, b"answer")
assert ranks.receive(1) == b"answer"
ranks.close()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, env=environment, timeout=60, check=True)
