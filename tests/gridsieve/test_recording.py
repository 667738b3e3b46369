"""`gridsieve live --index`: what a camera showed is found in its index, and recalled by questions beyond the window."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import math
import os
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from typer.testing import Result

from gridsieve.client.client import GridsieveClient
from gridsieve.client.live_events import Filmed, LiveSlice, LiveUsage, WallClock
from gridsieve.common.contract.plan import Grid
from gridsieve.moments.recording import Recording
from gridsieve.search.sqlite_store import SqliteStore
from gridsieve.v1.generation_pb2 import EmbedResponse, LiveAsk
from tests.gridsieve.fake_services import BEGAN_S, FakeServices
from tests.gridsieve.films import BLUE, GREEN, RED, FakeEmbedder, write_film

Run = Callable[..., Result]
COLOURS = (RED, GREEN, BLUE)


def frames_of(film: bytes) -> list[tuple[float, int]]:
    """The time of each frame, and the number of its colour."""
    with av.open(io.BytesIO(film)) as container:
        decoded = [(each.time, each.to_ndarray(format="rgb24").mean(axis=(0, 1))) for each in container.decode(video=0)]
    return [(float(time_s or 0), nearest(colour)) for time_s, colour in decoded]


def nearest(colour: Any) -> int:
    return int(np.argmin([np.abs(np.array(each) - colour).max() for each in COLOURS]))


class Colours(FakeEmbedder):
    """A film's vector is at the number of its first frame's colour on the circle, a text's at its number."""

    answers: asyncio.Event | None = None

    async def Embed(self, request: Any, context: Any) -> Any:
        if self.answers:
            await self.answers.wait()
        part = request.prompt.messages[0].parts[0]
        angle = frames_of(part.video.data)[0][1] if part.HasField("video") else float(part.text)
        return EmbedResponse(embedding=[math.cos(angle), math.sin(angle)], request_id="r1")


@pytest.fixture
def embedder() -> Colours:
    return Colours()


@pytest.fixture
def yard(tmp_path: Path) -> Path:
    """What the camera shows: each colour for ten seconds. A slice shows two frames a second, the last at its half."""
    return write_film(tmp_path / "yard.mp4", [(colour, 10) for colour in COLOURS])


def test_a_question_recalls_what_the_camera_showed_earlier(
    gridsieve: Run, services: FakeServices, address: str, embeds: str, yard: Path, tmp_path: Path
) -> None:
    flags = ("--every-s", "0", "--speed", "1000", "--index", str(tmp_path / "kept"), "--embedder", embeds)
    result = gridsieve("live", str(yard), "1", *flags, "--recall", "1", "--server", address)
    assert result.exit_code == 0, result.output
    assert not any(isinstance(each, LiveAsk) for each in services.asked)
    *_, asked = services.asked
    _, named, recalled, live, newest, question = asked.prompt.messages[0].parts
    assert (named.text, question.text) == ("yard/2026-11-30T09-45-10.500Z.mp4, 0.0 to 10.0 seconds:", "1")
    assert frames_of(recalled.video.data) == [(pytest.approx(each, abs=1e-3), 1) for each in range(10)]
    assert live.text == "yard, live, now, from 2026-11-30T09-45-14.500Z on:"
    shown = newest.video.frames
    assert list(shown.timestamps_s) == [14.5 + each for each in range(16)]
    colours = [nearest(np.asarray(Image.open(io.BytesIO(each))).mean(axis=(0, 1))) for each in shown.pictures]
    assert colours == [1] * 6 + [2] * 10
    assert result.stdout == "29.5 s: A red ball ⚽\n"
    assert "shown: yard/2026-11-30T09-45-10.500Z.mp4  0.00–10.00 s  1.000" in result.stderr
    # At the end the index has all of it, as films of their own.
    search = gridsieve("search", str(tmp_path / "kept"), "2", "--embedder", embeds, "--json")
    moments = json.loads(search.stdout)["moments"]
    assert [each["file"] for each in moments] == [f"yard/2026-11-30T09-45-{s}.500Z.mp4" for s in (20, 10, "00")]


def test_a_question_that_is_asked_by_time_recalls_too(
    gridsieve: Run, services: FakeServices, address: str, embeds: str, yard: Path, tmp_path: Path
) -> None:
    flags = ("--speed", "1000", "--index", str(tmp_path / "kept"), "--embedder", embeds, "--recall", "2", "--json")
    result = gridsieve("live", str(yard), "0", "--every-s", "4", *flags, "--server", address)
    assert result.exit_code == 0, result.output
    assert not services.opened.triggers
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert {each["question"] for each in lines} == {"0"}
    assert {"time_s", "answer", "shown"} <= lines[-1].keys()


def slice_at(time_s: float, wall_s: float = BEGAN_S) -> LiveSlice:
    """A red slice of a session."""
    snapshot = io.BytesIO()
    Image.new("RGB", (64, 48), RED).save(snapshot, "JPEG")
    filmed = Filmed(wall_s, WallClock.SERVICE, snapshot.getvalue())
    usage = LiveUsage(**dict.fromkeys((each.name for each in fields(LiveUsage)), 0))
    return LiveSlice(time_s, time_s, Grid(1, 1, 1), np.zeros(1, np.int32), usage, filmed)


async def test_films_are_written_while_the_embedder_is_slow(
    embedder: Colours, embeds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the beginning waits for films of earlier days, nor are films lost at the end."""
    monkeypatch.setattr("gridsieve.moments.recording.END_S", 0.0)
    write_film(tmp_path / "kept" / "earlier.mp4", [(RED, 2)])
    embedder.answers = asyncio.Event()  # never
    async with (
        asyncio.timeout(60),
        GridsieveClient(embeds) as client,
        Recording(tmp_path / "kept", client) as recording,
    ):
        for camera in ("yard", "door", "gate"):
            recording.take(camera, slice_at(0.5))
    assert {each.parent.name for each in (tmp_path / "kept").glob("*/*.mp4")} == {"yard", "door", "gate"}


@pytest.mark.parametrize("scan_s", [3600.0, 0.0])
async def test_a_new_film_is_added_without_a_look_at_the_others_until_the_next_scan(
    scan_s: float, embeds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gridsieve.moments.recording.SCAN_S", scan_s)
    async with GridsieveClient(embeds) as client, Recording(tmp_path, client) as recording:
        recording.take("yard", slice_at(0.5))
        await recording.complete()
        gone = next((tmp_path / "yard").iterdir())
        gone.unlink()
        write_film(tmp_path / "other.mp4", [(GREEN, 2)])
        recording.take("yard", slice_at(10.5, BEGAN_S + 10))
        await recording.complete()
        _, found = await recording.recalled("yard", "0", best=9)
    new = "yard/2026-11-30T09-45-10.000Z.mp4"  # what is gone is not recalled, whether the index knows or not
    assert [each.path for each in found] == ([new] if scan_s else ["other.mp4", new])


async def test_a_store_that_is_slow_does_not_hold_the_event_loop(
    embeds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, threads = SqliteStore._run, dict[str, set[int]]()

    def noted(store: SqliteStore, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        threads.setdefault(sql.partition(" ")[0], set()).add(threading.get_ident())
        return run(store, sql, *values)

    monkeypatch.setattr(SqliteStore, "_run", noted)
    async with GridsieveClient(embeds) as client, Recording(tmp_path, client) as recording:
        recording.take("yard", slice_at(0.5))
        await recording.complete()
    assert threads.keys() >= {"INSERT", "SELECT", "DELETE"}
    assert threading.get_ident() not in set().union(*threads.values())


async def test_a_clock_that_is_set_back_overwrites_no_film(embeds: str, tmp_path: Path) -> None:
    async with GridsieveClient(embeds) as client, Recording(tmp_path, client) as recording:
        for time_s in (20.5, 10.5, 0.5):  # a session that begins again
            recording.take("yard", slice_at(time_s))
    names = ["2026-11-30T09-45-00.000Z.mp4", "2026-11-30T09-45-00.000Z-2.mp4", "2026-11-30T09-45-00.000Z-3.mp4"]
    assert {each.name for each in (tmp_path / "yard").iterdir()} == {*names}


async def test_a_film_that_cannot_be_written_is_told_and_leaves_no_file(
    embeds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that is full."""

    def full(path: Path, pictures: Any) -> None:
        path.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gridsieve.moments.recording._encode_film", full)
    said: list[str] = []
    async with GridsieveClient(embeds) as client, Recording(tmp_path, client, say=said.append) as recording:
        recording.take("yard", slice_at(0.5))
    assert said == ["yard: a film cannot be written: [Errno 28] No space left on device"]
    assert not list((tmp_path / "yard").iterdir())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--index", "KEPT"), "--index needs --embedder"),
        (("--recall", "2"), "--recall needs --index"),
        (("--index", "KEPT", "--embedder", "x", "--recall", "2", "--on-change", "0.5"), "exclude each other"),
    ],
)
def test_wrong_usage_names_what_is_missing(flags: tuple[str, ...], words: str, gridsieve: Run, yard: Path) -> None:
    given = (each.replace("KEPT", str(yard.parent)) for each in flags)
    result = gridsieve("live", str(yard), "?", *given)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())


def test_an_index_of_other_settings_is_refused_at_once(
    gridsieve: Run, services: FakeServices, address: str, embeds: str, yard: Path
) -> None:
    assert gridsieve("index", str(yard.parent), "--embedder", embeds).exit_code == 0
    flags = ("--index", str(yard.parent), "--embedder", embeds, "--server", address)
    result = gridsieve("live", str(yard), "?", *flags)
    assert (result.exit_code, services.opened) == (1, None)
    assert "window_s None, got 10.0" in result.stderr
