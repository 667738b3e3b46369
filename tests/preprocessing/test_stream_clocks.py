"""Streams whose time stamps are wrong: MPEG-TS, in which those of single frames are replaced."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gridsieve.services.preprocessing.video import stream
from tests import media
from tests.preprocessing.media_server import head, serving
from tests.preprocessing.preprocessing_media import restamped
from tests.preprocessing.service import Service
from tests.preprocessing.test_watch import all_of, assert_shown, assert_some_shown, cut, opened

pytestmark = pytest.mark.asyncio(loop_scope="session")

TICKS_PER_S = 90_000
PACKET_BYTES = 188
FPS = 10
DATA = media.stream("mpegts", frames=3 * FPS, fps=FPS, b_frames=0)


def stamped(data: bytes, moved_s: Callable[[int], float]) -> bytes:
    """The same stream; the time stamp of each frame, by its number, is later by so many seconds."""
    return restamped(data, lambda number: (moved_s(number),) * 2)


WRONG = {
    "one leap": lambda number: 72_000 * (number == 14),
    "one fall": lambda number: -1.0 * (number == 14),
    "two leaps": lambda number: 40_000 * (number == 14) + 80_000 * (number == 15),
    "a leap": lambda number: 75_438 * (number > 14),
    "a fall": lambda number: 20_005 * (number < 15),
    "a clock that wraps": lambda number: 2**33 / TICKS_PER_S - 2.7,
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_clips_go_on_where_their_clock_leaps_or_falls(stub: Any, wrong: str) -> None:
    data = stamped(DATA, WRONG[wrong])
    watched = await all_of(await opened(stub), cut(data, (1777,)))
    assert_shown(watched, DATA, moved_s=WRONG[wrong](0), within_s=1e-4)


async def test_a_film_that_comes_at_once_keeps_its_times(service: Service) -> None:
    """As a live source: the host's clock stands still meanwhile, and one time stamp is wrong."""
    film = media.stream("mpegts", frames=30, fps=1, b_frames=0)
    times_s = [time_s for time_s, _ in media.shown(film)]
    async with serving(head(200) + stamped(film, WRONG["one leap"])) as server, service.serving(server) as stub:
        watched = await all_of(await opened(stub, f"http://clip.test:{server.port}/"))
        assert watched.frames[-1][0] > 20  # newer frames take the place of others
        assert_some_shown(watched, film)
        assert all(min(abs(each - time_s) for each in times_s) < 1e-4 for time_s, _ in watched.frames)


@pytest.mark.parametrize("passed_s", [60, 0])
async def test_a_pause_is_kept_if_it_passed_at_the_host(monkeypatch: pytest.MonkeyPatch, passed_s: int) -> None:
    data = stamped(DATA, lambda number: 60 * (number > 14))
    begins = [found.start() // PACKET_BYTES * PACKET_BYTES for found in re.finditer(rb"\x00\x00\x01\xe0", data)]
    parts = iter((data[: begins[15]], data[begins[15] :]))
    host_s = 0.0

    def more() -> bytes:
        nonlocal host_s
        part = next(parts, b"")
        host_s += passed_s * part.endswith(data[-PACKET_BYTES:])
        return part

    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=lambda: host_s))
    times_s = [frame.time_us / 10**6 for frame in stream.stream_frames(more, FPS, "data", live=True)]
    assert times_s[-1] - times_s[0] == pytest.approx(passed_s + 29 / FPS, abs=1.1 / FPS)


async def test_a_live_clock_that_leaps_goes_on_with_the_hosts(service: Service) -> None:
    data = stamped(DATA, WRONG["a leap"])

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200))
        for piece in cut(data, (len(data) // 30,)):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(1 / FPS)

    async with serving(answer) as server, service.serving(server) as stub:
        began_s = time.monotonic()
        watched = await all_of(await opened(stub, f"http://clip.test:{server.port}/"))
        assert len(watched.frames) > 3
        assert 1 < watched.frames[-1][0] - watched.frames[0][0] < time.monotonic() - began_s + 1
