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

from common import ranks as rank_processes
from common.ranks import Ranks
from tests.awake import awake

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
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def noted(folder: Path, rank: int) -> list[str]:
    path = folder / f"rank-{rank}-of-3"
    return path.read_text().splitlines()[1:] if path.exists() else []


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter where it went since the file was opened
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


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


def test_a_rank_that_stands_still_is_waited_for_as_long_as_one_says(ranks: Ranks) -> None:
    ranks.tell_one(1, b"hang")
    with pytest.raises(TimeoutError):
        ranks.hear(1, 0.05)
    ranks.tell_one(2, b"answer")
    assert ranks.hear(2, 20) == b"answeranswer"


def test_all_that_are_busy_are_ended_after_one_while(
    tmp_path: Path, lost: Queue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "_EXIT_S", 1.0)
    ranks = Ranks(STAND_IN, 6, {"folder": str(tmp_path)}, lost.put)
    ranks.tell(b"hang")
    until(lambda: all((tmp_path / f"rank-{rank}-of-6").exists() for rank in range(1, 6)))
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


def test_ranks_whose_service_ends_while_they_start_end_as_well(tmp_path: Path) -> None:
    """They are told all, and then somebody else is their parent."""
    program = f"""
import os
from common.ranks import Ranks
ranks = Ranks({STAND_IN!r}, 3, {{"folder": {str(tmp_path)!r}}}, print)
ranks.tell(b"hang")
print(*ranks.pids, flush=True)
os._exit(0)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout
        pids = [int(pid) for pid in service.stdout.readline().split()]
    try:
        assert len(pids) == 2
        until(lambda: not any(map(runs, pids)))
    finally:
        for pid in filter(runs, pids):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("flags", "status"), [(("-P",), 0), ((), 9)])
def test_ranks_import_from_the_working_directory_where_their_service_does(
    tmp_path: Path, flags: tuple[str, ...], status: int
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    program = f"""
import sys
sys.path = [each for each in sys.path if each]
from common.ranks import Ranks
ranks = Ranks({STAND_IN!r}, 2, {{"folder": {str(tmp_path)!r}}}, lambda _: None)
status = ranks._ranks[0].process.poll
ranks.tell_one(1, b"answer") if {status} == 0 else ranks._ranks[0].process.wait()
assert {status} or ranks.hear(1) == b"answer"
ranks.close()
sys.exit(ranks._ranks[0].process.returncode)
"""
    root = str(Path(__file__).parents[2])
    ended = subprocess.run(
        [sys.executable, *flags, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, timeout=60
    )
    assert ended.returncode == status
