"""Jobs in a Ray cluster of real nodes on loopback: lost nodes, killed drivers, stacks of workers' own, the example."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clips import another_file
from demo.example import CLIP, QUESTIONS
from gridsieve.v1 import generation_pb2_grpc
from tests.gridsieve.fake_services import FakeServices
from tests.integration.fleet import ROOT, until
from tests.integration.ray_cluster import Cluster, cluster
from tests.served import served

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'gridsieve[ray]'"),
]
JOB = """
import sys
import gridsieve.ray
from gridsieve.cli.launcher import LocalStack

clips, output, asking = map(eval, sys.argv[1:])
gridsieve.ray.run(clips, output, "What moves?", **asking)
"""
UNCOMPILED = dict.fromkeys(("encoder", "generation"), ("--compile", "off"))
SOON_S = 180.0  # on a machine whose cores are busy


class Gate(generation_pb2_grpc.GenerationServiceServicer):
    """Generation that answers `free` requests, and the others once it is `opened`.

    asked: the clips of all requests. held: how many wait now. lost: those whose caller was gone while they waited.
    """

    def __init__(self, free: int) -> None:
        self.fake = FakeServices()
        self.free = free
        self.asked: list[bytes] = []
        self.held = self.lost = 0
        self.opened = threading.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.asked.append(request.prompt.messages[-1].parts[0].video.data)
        if len(self.asked) > self.free:
            self.held += 1
            try:
                while not self.opened.is_set():
                    await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                self.lost += 1
                raise
            finally:
                self.held -= 1
        async for each in self.fake.Generate(request, context):
            yield each


@pytest.fixture(scope="module")
def head() -> Iterator[Cluster]:
    """A cluster of one node."""
    with cluster(cpus=1) as made:
        yield made


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(free=6)
    register = generation_pb2_grpc.add_GenerationServiceServicer_to_server
    with served(lambda server: register(made, server), f"unix:{tmp_path}/generation.sock"):
        yield made


@pytest.fixture
def clips(tmp_path: Path) -> list[str]:
    (tmp_path / "clips").mkdir()
    paths = [tmp_path / "clips" / f"{index:02}.mp4" for index in range(24)]
    for path in paths:
        path.write_bytes(path.name.encode())
    return [str(path) for path in paths]


def begin(head: Cluster, tmp_path: Path, clips: list[str], **asking: Any) -> subprocess.Popen[str]:
    """A job that asks the gate unless told otherwise, and writes to the folder `output`."""
    given = {"services": f"unix:{tmp_path}/generation.sock", "in_flight": 2, "rows_per_file": 4} | asking
    return head.driver("-c", JOB, repr(clips), repr(str(tmp_path / "output")), repr(given))


async def finish(job: subprocess.Popen[str]) -> str:
    printed, _ = await asyncio.to_thread(job.communicate, timeout=SOON_S)
    assert job.returncode == 0, printed
    return printed


def written(tmp_path: Path) -> list[dict[str, Any]]:
    """The rows of all files that are complete, sorted by URI."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = list[dict[str, Any]]()
    for path in (tmp_path / "output").glob("*.parquet"):
        with suppress(pa.ArrowInvalid):
            found += pq.read_table(path).to_pylist()
    return sorted(found, key=lambda row: str(row["uri"]))


async def test_clips_of_a_lost_node_are_asked_again_and_each_is_written_once(
    head: Cluster, gate: Gate, clips: list[str], tmp_path: Path
) -> None:
    node = head.add(cpus=1, worker=2)  # a resource that the head does not have
    await until(lambda: node.ready, SOON_S)
    job = begin(head, tmp_path, clips, workers=2, reserve={"resources": {"worker": 1}})
    await until(lambda: gate.held == 4 or job.poll() is not None, SOON_S)  # two workers with two requests each
    node.kill()
    await until(lambda: gate.lost == 4 or job.poll() is not None, SOON_S)
    gate.opened.set()
    head.add(cpus=1, worker=2)
    printed = await finish(job)
    rows = written(tmp_path)
    assert [row["uri"] for row in rows] == clips, printed
    assert {row["answer"] for row in rows} == {"A red ball ⚽"}
    assert len(gate.asked) >= len(clips) + 4


async def test_a_job_that_was_killed_goes_on_and_asks_nothing_that_is_written(
    head: Cluster, gate: Gate, clips: list[str], tmp_path: Path
) -> None:
    job = begin(head, tmp_path, clips, workers=1)
    await until(lambda: (gate.held == 2 and written(tmp_path)) or job.poll() is not None, SOON_S)
    job.kill()
    await asyncio.to_thread(job.communicate)
    await until(lambda: gate.held == 0, SOON_S)
    before = [row["uri"] for row in written(tmp_path)]
    assert 0 < len(before) <= gate.free
    whole = next((tmp_path / "output").glob("*.parquet"))
    torn = whole.with_name("torn.parquet")
    torn.write_bytes(whole.read_bytes()[:-9])

    gate.asked.clear()
    gate.opened.set()
    await finish(begin(head, tmp_path, clips, workers=1))
    assert [row["uri"] for row in written(tmp_path)] == clips
    assert not torn.exists()
    assert sorted(gate.asked) == sorted(Path(uri).name.encode() for uri in set(clips) - set(before))

    gate.asked.clear()
    await finish(begin(head, tmp_path, [*clips, *clips], workers=1))
    assert len(written(tmp_path)) == len(clips)
    assert not gate.asked


async def test_workers_start_stacks_of_their_own_and_others_after_a_service_has_ended(
    head: Cluster, tmp_path: Path
) -> None:
    # So many that most are not yet answered when Ray has written the first row, which takes it seconds.
    clips = [tmp_path / f"{index:02}.mp4" for index in range(24)]
    for path in clips:
        path.write_bytes(another_file(CLIP.read_bytes()))
    stack = f"LocalStack(flags={UNCOMPILED})"
    asking = {"in_flight": 1, "rows_per_file": 1, "workers": 1}
    asked = f"{{'services': {stack}, **{asking}}}"
    job = head.driver("-c", JOB, repr(list(map(str, clips))), repr(str(tmp_path / "output")), asked)
    await until(lambda: written(tmp_path) or job.poll() is not None, SOON_S)
    for pid in head.nodes[0].running("gridsieve.services.generation"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    printed = await finish(job)
    rows = written(tmp_path)
    assert [row["uri"] for row in rows] == list(map(str, clips)), printed
    assert {row["answer"] for row in rows} == {QUESTIONS[0].answer}
    logs = (head.folder / "session_latest" / "logs").glob("worker-*.err")
    assert any("generation has ended" in log.read_text() for log in logs)
    await until(lambda: not head.nodes[0].running("gridsieve.services"), SOON_S)


async def test_the_example_reads_a_folder_by_its_uri_and_says_what_failed(
    head: Cluster, gate: Gate, clips: list[str], tmp_path: Path
) -> None:
    gate.opened.set()
    example = [str(ROOT / "examples" / "ray_captions.py"), f"file://{tmp_path}/clips", f"file://{tmp_path}/output"]
    environment = {**head.environment, "GRIDSIEVE_SERVER": f"unix:{tmp_path}/generation.sock"}
    command = [sys.executable, *example, "refuse"]
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=SOON_S,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "24 clips, 24 of them without an answer"
    assert [row["uri"] for row in written(tmp_path)] == [f"file://{uri}" for uri in clips]
