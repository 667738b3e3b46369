"""Streams are admitted while there is memory for one more, and cores that the cameras before it leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from gridsieve.services.preprocessing.workers.stream_room import CoresUsed, StreamRoom

GIB = 2**30


@dataclass
class Machine:
    """Simulates cameras: each takes processor time for its process, and for each pixel that it sends.

    Where they need more than there are, each gets its part of the cores.
    """

    room: StreamRoom
    cores: int
    clock_s: float = 0.0
    needs: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    cameras: list[CoresUsed] = field(default_factory=list)
    refusal: str = ""

    def admits(self, width: int, height: int, fps: float) -> bool:
        measured = [cores for each in self.cameras if (cores := each.now()) is not None]
        self.refusal = self.room.refusal(len(self.cameras), len(self.cameras), measured)
        if not self.refusal:
            number = len(self.needs)
            self.needs.append(0.005 + 7e-9 * width * height * fps)
            self.processor_s.append(0.0)
            self.cameras.append(CoresUsed(lambda: self.processor_s[number], lambda: self.clock_s))
        return not self.refusal

    def run(self, seconds: float) -> None:
        self.clock_s += seconds
        given = min(1.0, self.cores / sum(self.needs)) * seconds
        self.processor_s = [used + need * given for used, need in zip(self.processor_s, self.needs, strict=True)]


@pytest.mark.parametrize("cores", [1, 2, 16])
@pytest.mark.parametrize(
    "cameras",
    [[(1280, 720, 25)], [(640, 360, 15)], [(1920, 1080, 15), (640, 360, 15), (640, 360, 5)], [(3840, 2160, 25)]],
)
def test_cameras_that_come_one_by_one_use_three_quarters_of_the_cores_whatever_they_send(
    cores: int, cameras: Sequence[tuple[int, int, float]]
) -> None:
    machine = Machine(StreamRoom.of(cores, 512 * GIB, None), cores)
    while machine.admits(*cameras[len(machine.needs) % len(cameras)]):
        machine.run(20)
    largest = 0.005 + max(7e-9 * width * height * fps for width, height, fps in cameras)
    assert 0.75 * cores <= sum(machine.needs) <= 0.75 * cores + largest
    assert "--max-streams is unset: three quarters of the cores" in machine.refusal


def test_cameras_that_come_at_once_count_as_usual_ones_until_they_are_measured() -> None:
    machine = Machine(StreamRoom.of(2, 512 * GIB, None), 2)
    while machine.admits(640, 360, 15):
        machine.run(0.01)
    assert len(machine.needs) == 30
    assert machine.refusal.startswith("30 cameras are watched, which use 1.50 cores, and no more may be while they use")
    machine.run(20)
    while machine.admits(640, 360, 15):  # which count as those before them
        machine.run(0.01)
    assert sum(machine.needs) == pytest.approx(1.5, abs=0.05)


def test_a_camera_whose_pictures_cost_less_at_night_leaves_room() -> None:
    machine = Machine(StreamRoom.of(1, 512 * GIB, None), 1)
    while machine.admits(1920, 1080, 15):
        machine.run(20)
    machine.needs = [need / 4 for need in machine.needs]
    machine.run(20)
    assert machine.admits(1920, 1080, 15)


@pytest.mark.parametrize(
    ("memory_gib", "max_requests", "most", "why"),
    [
        (8, 1024, 32, "a quarter of 8192 MiB, 64 for each"),
        (512, 1024, 512, "half of --max-requests 1024"),
        (0.0625, None, 1, "a quarter of 64 MiB, 64 for each"),
    ],
)
def test_memory_and_requests_bound_the_streams(
    memory_gib: float, max_requests: int | None, most: int, why: str
) -> None:
    room = StreamRoom.of(64, int(memory_gib * GIB), max_requests)
    assert (room.most, room.why) == (most, f"--max-streams is unset: {why}")
    assert (
        room.refusal(most, most, [])
        == f"{most} streams are watched, and no more may be (--max-streams is unset: {why})"
    )


def test_a_number_of_the_operator_counts_alone() -> None:
    room = StreamRoom(3)
    assert not room.refusal(2, 2, [16.0, 16.0])
    assert room.refusal(3, 3, []) == "3 streams are watched, and no more may be (--max-streams)"


def test_what_clients_send_does_not_count_as_cameras() -> None:
    room = StreamRoom.of(2, 512 * GIB, None)
    assert not room.refusal(streams=30, cameras=2, measured=[0.5, 0.5])
    assert room.refusal(streams=3, cameras=3, measured=[0.5, 0.5])
