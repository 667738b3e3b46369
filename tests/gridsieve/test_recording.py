"""`gridsieve live --index`: what a camera showed is found in its index, and recalled by questions beyond the window."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from typer.testing import Result

from gridsieve.v1 import generation_pb2_grpc
from gridsieve.v1.generation_pb2 import EmbedResponse, LiveAsk
from tests.gridsieve.fake_services import FakeServices
from tests.gridsieve.films import BLUE, GREEN, RED, FakeEmbedder, write_film
from tests.served import served

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

    async def Embed(self, request: Any, context: Any) -> Any:
        part = request.prompt.messages[0].parts[0]
        angle = frames_of(part.video.data)[0][1] if part.HasField("video") else float(part.text)
        return EmbedResponse(embedding=[math.cos(angle), math.sin(angle)], request_id="r1")


@pytest.fixture
def embeds(tmp_path: Path) -> Iterator[str]:
    with served(
        lambda server: generation_pb2_grpc.add_GenerationServiceServicer_to_server(Colours(), server),
        f"unix:{tmp_path}/embedder.sock",
    ) as address:
        yield address


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
