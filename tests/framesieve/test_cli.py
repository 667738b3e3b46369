"""The command against hand-written services on unix sockets: what it prints where, and how it exits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from common.contract.errors import MediaDamaged
from common.contract.retention import METHODS
from tests.framesieve.fake_services import FakeServices


def test_ask_streams_the_answer_to_stdout_and_its_cost_to_stderr(
    framesieve: Callable[..., Result], address: str, clip: str
) -> None:
    result = framesieve("ask", clip, "What moves?", "--pruning-rate", "0.75", "--server", address)
    assert result.exit_code == 0
    assert result.stdout == "A red ball ⚽\n"
    assert "12 → 8 prompt tokens · 2 tokens in 0.75 s, the first after 0.50 s" in result.stderr
    assert "3 damaged frames" in result.stderr
    assert "sees no motion" in result.stderr


def test_ask_sends_what_it_was_told(
    framesieve: Callable[..., Result], services: FakeServices, address: str, clip: str, tmp_path: Path
) -> None:
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(b"photo")
    settings = ["--pruning-rate", "0.5", "--method", "random", "--fps", "4", "--max-frames", "16"]
    choices = ["--max-new-tokens", "5", "--temperature", "0", "--seed", "7"]
    framesieve("ask", clip, str(photo), "What differs?", *settings, *choices, "--server", address)
    (request,) = services.asked
    video, image, text = request.prompt.messages[0].parts
    assert (video.video.data, image.image.data, text.text) == (b"film", b"photo", "What differs?")
    assert (video.video.frame_sampling.fps, video.video.frame_sampling.max_frames) == (4, 16)
    assert (request.pruning.rate, request.pruning.method) == (0.5, "random")
    assert (request.sampling.max_new_tokens, request.sampling.temperature, request.sampling.seed) == (5, 0, 7)


def test_ask_names_files_on_the_server_without_sending_them(
    framesieve: Callable[..., Result], services: FakeServices, address: str
) -> None:
    assert framesieve("ask", "films/a.mp4", "?", "--on-server", "--server", address).exit_code == 0
    assert services.asked[0].prompt.messages[0].parts[0].video.path == "films/a.mp4"


@pytest.mark.parametrize("flags", [[], ["--on-server"]])
def test_ask_sends_urls_as_they_stand(
    framesieve: Callable[..., Result], services: FakeServices, address: str, flags: list[str]
) -> None:
    urls = ["https://a.test//clip.mp4?x=1", "http://a.test/photo.jpg?x=clip.mp4", "data:image/png,x"]
    assert framesieve("ask", *urls, "?", *flags, "--fps", "4", "--server", address).exit_code == 0
    video, photo, inline, _ = services.asked[0].prompt.messages[0].parts
    assert [video.video.url, photo.image.url, inline.image.url] == urls
    assert video.video.frame_sampling.fps == 4


def test_ask_needs_no_media(framesieve: Callable[..., Result], services: FakeServices, address: str) -> None:
    assert framesieve("ask", "Hello?", "--server", address).exit_code == 0
    assert [part.text for part in services.asked[0].prompt.messages[0].parts] == ["Hello?"]


def test_json_is_one_object_and_nothing_else(framesieve: Callable[..., Result], address: str, clip: str) -> None:
    result = framesieve("ask", clip, "What moves?", "--server", address, "--json")
    assert result.stderr == ""
    told = json.loads(result.stdout)
    assert told["answer"] == "A red ball ⚽"
    assert told["finish_reason"] == "stop"
    assert told["usage"]["prompt_tokens_full"] == 12
    assert told["usage"]["media"][0] == {
        "modality": "video", "grid": {"t": 2, "h": 2, "w": 2}, "kept_tokens": 4,
        "repaired_frames": 3, "first_slice_only": True,
    }  # fmt: skip
    assert told["timings"]["decode_s"] == 0.5


def test_a_refusal_is_one_line_that_begins_with_its_reason(
    framesieve: Callable[..., Result], services: FakeServices, address: str, clip: str
) -> None:
    services.refusal = MediaDamaged("12 of 40 frames [0.30] cannot be decoded")
    result = framesieve("ask", clip, "?", "--server", address)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "MEDIA_DAMAGED: 12 of 40 frames [0.30] cannot be decoded\n"


def test_where_nothing_listens_the_error_says_how_to_start_it(
    framesieve: Callable[..., Result], tmp_path: Path
) -> None:
    result = framesieve("ask", "?", "--server", f"unix:{tmp_path}/nobody.sock")
    assert result.exit_code == 1
    assert "framesieve serve" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--top-k", str(2**40)], "Sampling.top_k must be a 32-bit integer, got 1099511627776"),
        (["--max-frames", str(2**33)], "FrameSampling.max_frames must be a 32-bit integer, got 8589934592"),
        (["--stop", "\udcff"], r"Sampling.stop must be text in Unicode, got ['\udcff']"),
    ],
)
def test_what_no_request_can_hold_is_refused_in_one_line(
    framesieve: Callable[..., Result], address: str, clip: str, flags: list[str], told: str
) -> None:
    result = framesieve("ask", clip, "What moves?", *flags, "--server", address)
    assert result.exit_code == 1
    assert result.stderr == f"INVALID_REQUEST: {told}\n"


def test_a_missing_file_is_named(framesieve: Callable[..., Result], address: str, tmp_path: Path) -> None:
    result = framesieve("ask", str(tmp_path / "no.mp4"), "?", "--server", address)
    assert (result.exit_code, result.stderr) == (1, f"FILE: {tmp_path}/no.mp4: No such file or directory\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("ask",),
        ("ask", "?", "--pruning-rate", "1"),
        ("ask", "?", "--pruning-rate", "nan"),
        ("ask", "?", "--method", "magic"),
        ("inspect", "clip.mp4", "--encoder", "localhost:1"),
        ("serve", "--no-such-flag"),
    ],
)
def test_wrong_usage_exits_with_2(framesieve: Callable[..., Result], arguments: tuple[str, ...]) -> None:
    assert framesieve(*arguments).exit_code == 2


@pytest.mark.parametrize("command", ["serve", "ask", "inspect"])
def test_help_ends_with_an_example(framesieve: Callable[..., Result], command: str) -> None:
    assert f"Example: framesieve {command}" in framesieve(command, "--help").stdout


@pytest.mark.parametrize("command", ["ask", "inspect"])
def test_help_says_what_each_method_keeps(framesieve: Callable[..., Result], command: str) -> None:
    told = framesieve(command, "--help").stdout
    assert [f"{method}: " in told for method in METHODS] == [True] * len(METHODS)


def test_help_says_where_a_video_gets_a_rate_of_its_own(framesieve: Callable[..., Result]) -> None:
    assert "Video(pruning=...)" in framesieve("ask", "--help").stdout


def test_ctrl_c_exits_with_130_and_cancels_the_request(services: FakeServices, address: str, clip: str) -> None:
    services.hang.set()
    code = "from framesieve.__main__ import app; app()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "ask", clip, "?", "--server", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(6) == b"A red "
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert b"Traceback" not in process.stderr.read()
    assert services.cancelled.wait(20)
