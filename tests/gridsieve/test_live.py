"""`gridsieve live` against hand-written services: which frames of a film arrive, how they look, and how it exits."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from threading import Thread
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from typer.testing import Result

from gridsieve.v1.generation_pb2 import LiveAsk, LiveFrame
from tests import media
from tests.gridsieve.fake_services import FakeServices
from tests.preprocessing.preprocessing_media import B_FRAMES, clip, number_of, picture_of, shifted

FILM = clip(30, 10, options=B_FRAMES)

Run = Callable[..., Result]


def ts(frames: int) -> bytes:
    return clip(frames, 10, "mpegts", options=B_FRAMES)


def shown(services: FakeServices) -> list[tuple[float, NDArray[np.uint8]]]:
    """The time and the pixels of each frame that arrived."""
    frames = [each for each in services.asked if isinstance(each, LiveFrame)]
    return [(each.time_s, np.asarray(Image.open(io.BytesIO(each.picture)))) for each in frames]


@pytest.fixture
def play(gridsieve: Run, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Plays a film, a thousand times as fast; its name tells nothing of what it is, and reads like a field."""
    monkeypatch.chdir(tmp_path)

    def play(film: bytes, *flags: str) -> Result:
        Path("sampling.film").write_bytes(film)
        return gridsieve("live", "sampling.film", "What moves?", "--speed", "1000", "--server", address, *flags)

    return play


@pytest.mark.parametrize(
    ("film", "rate", "numbers"),
    [
        (FILM, 10, range(0, 30, 5)),
        (ts(20) + ts(30), 10, (0, 5, 10, 15, 0, 5, 10, 15, 20, 25)),  # joined recordings
        (shifted(clip(40, 10, options=B_FRAMES), "matroska", Fraction(-2)), 10, range(0, 40, 5)),  # times below 0
        (clip(50, 25, "h264", options=B_FRAMES), 25, (0, 13, 25, 38)),  # no times at all
    ],
)
def test_each_frame_arrives_at_its_time(
    play: Run, services: FakeServices, film: bytes, rate: int, numbers: tuple[int, ...]
) -> None:
    result = play(film, "--every-s", "0")
    assert result.exit_code == 0, result.output
    assert [number_of(pixels) for _, pixels in shown(services)] == list(numbers)
    times = [-(-place * rate // 2) / rate for place in range(len(numbers))]  # of the first frame of each half second
    assert [time_s for time_s, _ in shown(services)] == times


def test_frames_look_as_a_player_shows_them(play: Run, services: FakeServices) -> None:
    def wide_and_on_its_side(stream: Any) -> None:
        stream.codec_context.sample_aspect_ratio = Fraction(2)
        stream.set_display_matrix([0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30])

    play(clip(4, 10, prepare=wide_and_on_its_side))
    [(_, turned)] = shown(services)
    assert turned.shape == (128, 48, 3)
    expected = np.rot90(picture_of(0).repeat(2, axis=1), -1)
    assert abs(turned.astype(int) - expected)[8::16, 8::16].max() < 40

    services.asked.clear()
    file, clear = io.BytesIO(), Image.new("RGBA", (64, 48), (255, 0, 0, 0))
    clear.save(file, "PNG", save_all=True, append_images=[Image.new("RGBA", (64, 48), (0, 0, 255, 255))], duration=500)
    play(file.getvalue())
    white, blue = (pixels[24, 32].tolist() for _, pixels in shown(services))
    assert min(white) > 250
    assert blue[2] > 250 > 5 > blue[0]


def test_a_camera_and_a_pipe_are_read_as_they_come(
    gridsieve: Run, services: FakeServices, address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened, film = av.open, ts(30)

    def camera(device: str, mode: str, **options: Any) -> Any:
        assert (device, mode, options) == ("/dev/null", "r", {"format": "v4l2"})
        return opened(io.BytesIO(film), "r")

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    Thread(target=pipe.write_bytes, args=(film,), daemon=True).start()
    asked = ("?", "--every-s", "0", "--server", address)
    assert gridsieve("live", str(pipe), *asked, "--speed", "1000").exit_code == 0
    monkeypatch.setattr(av, "open", camera)
    assert gridsieve("live", "/dev/null", *asked, "--speed", "0.001").exit_code == 0  # a camera is not waited for
    found = [(time_s, number_of(pixels)) for time_s, pixels in shown(services)]
    assert found == 2 * [(place / 2, 5 * place) for place in range(6)]


@pytest.mark.parametrize(
    ("flags", "asked", "status"),
    [
        (("--every-s", "5"), 1, 0),
        (("--every-s", "2"), 0, 1),  # the service was to ask by itself, and did not
        (("--on-change", "0.5"), 0, 0),
        (("--every-s", "5", "--on-change", "0.5"), 1, 0),
    ],
)
def test_a_clip_that_ends_before_it_is_asked_about_is_asked_about_at_its_end(
    play: Run, services: FakeServices, flags: tuple[str, ...], asked: int, status: int
) -> None:
    result = play(FILM, *flags)
    assert result.exit_code == status
    assert sum(isinstance(each, LiveAsk) for each in services.asked) == asked
    assert isinstance(services.asked[-1], LiveAsk if asked else LiveFrame)
    assert ("UNAVAILABLE: the question could not be answered" in result.stderr) == bool(status)


def test_the_question_is_asked_with_the_schema_of_its_answers(
    play: Run, services: FakeServices, tmp_path: Path
) -> None:
    (tmp_path / "answer.json").write_text('{"type": "object"}')
    assert play(FILM, "--every-s", "5", "--schema", "answer.json").exit_code == 0
    assert services.asked[-1].sampling.json_schema == '{"type": "object"}'
    missing = play(FILM, "--schema", "nowhere.json")
    assert (missing.exit_code, missing.stderr) == (1, "FILE: nowhere.json: No such file or directory\n")


@pytest.mark.parametrize(
    ("film", "text"),
    [
        (b"text", "cannot be read as an image or a video: Invalid data found when processing input"),
        (media.picture(64, 48), "is a picture, not a video; gridsieve ask takes pictures"),
        (FILM[: len(FILM) // 2], "cannot be read as an image or a video"),  # its index was at its end
    ],
)
def test_what_is_no_video_is_refused_in_plain_words(play: Run, services: FakeServices, film: bytes, text: str) -> None:
    result = play(film)
    assert (result.exit_code, services.asked) == (1, [])
    assert result.stderr.startswith(f"MEDIA_REJECTED: 'sampling.film' {text}")


@pytest.mark.parametrize("scheme", ["rtmp", "srt", "udp", "file"])
def test_a_scheme_that_is_not_watched_is_refused_by_name(gridsieve: Run, scheme: str) -> None:
    result = gridsieve("live", f"{scheme}://user:password@camera.example/stream", "?")
    assert result.exit_code == 1
    told = f"{scheme}://camera.example/stream has the scheme {scheme}; supported are http, https, rtsp and rtsps"
    assert result.stderr == f"INVALID_REQUEST: {told}\n"
