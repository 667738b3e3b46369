"""`framesieve ask` against hand-written services: what it sends, what it prints where, and how it exits."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from common.contract.errors import MediaDamaged
from common.contract.retention import METHODS
from framesieve.v1 import generation_pb2
from tests.framesieve.conftest import COMMAND, SIGINT_IGNORED
from tests.framesieve.fake_services import FakeServices

Run = Callable[..., Result]


def test_the_completion_is_printed_to_stdout_and_its_cost_to_stderr(framesieve: Run, address: str, clip: str) -> None:
    result = framesieve("ask", clip, "What moves?", "--pruning-rate", "0.75", "--server", address)
    assert result.exit_code == 0
    assert result.stdout == "A red ball ⚽\n"
    assert "12 → 8 prompt tokens · 2 tokens in 0.75 s, the first after 0.50 s" in result.stderr
    assert "3 damaged frames" in result.stderr
    assert "sees no motion" in result.stderr
    assert "completion 1" not in result.stderr


def test_several_completions_are_printed_one_after_another_though_they_arrive_interleaved(
    framesieve: Run, address: str
) -> None:
    result = framesieve("ask", "?", "--server", address, "--n", "3")
    assert result.exit_code == 0
    assert result.stdout == "A red ball ⚽\nSomething\n\n"
    places = [result.stderr.index(f"completion {number} of 3") for number in (1, 2, 3)]
    assert places == sorted(places)
    assert "6 tokens in 0.75 s" in result.stderr


def test_media_and_their_flags_are_sent(
    framesieve: Run, services: FakeServices, address: str, clip: str, tmp_path: Path
) -> None:
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(b"photo")
    flags = ["--pruning-rate", "0.5", "--method", "random", "--fps", "4", "--max-frames", "16"]
    framesieve("ask", clip, str(photo), "What differs?", *flags, "--server", address)
    framesieve("ask", "films/a.mp4", "?", "--on-server", "--server", address)
    framesieve("ask", "Hello?", "--server", address)
    first, on_server, no_media = services.asked
    video, image, text = first.prompt.messages[0].parts
    assert (video.video.data, image.image.data, text.text) == (b"film", b"photo", "What differs?")
    assert (video.video.frame_sampling.fps, video.video.frame_sampling.max_frames) == (4, 16)
    assert (first.pruning.rate, first.pruning.method) == (0.5, "random")
    assert on_server.prompt.messages[0].parts[0].video.path == "films/a.mp4"
    assert [part.text for part in no_media.prompt.messages[0].parts] == ["Hello?"]


@pytest.mark.parametrize("flags", [[], ["--on-server"]])
def test_urls_are_sent_unchanged(framesieve: Run, services: FakeServices, address: str, flags: list[str]) -> None:
    urls = ["https://a.test//clip.mp4?x=1", "http://a.test/photo.jpg?x=clip.mp4", "data:image/png,x"]
    assert framesieve("ask", *urls, "?", *flags, "--fps", "4", "--server", address).exit_code == 0
    video, photo, inline, _ = services.asked[0].prompt.messages[0].parts
    assert [video.video.url, photo.image.url, inline.image.url] == urls
    assert video.video.frame_sampling.fps == 4


def test_sampling_flags_are_sent_and_unset_ones_leave_the_models_defaults(
    framesieve: Run, services: FakeServices, address: str
) -> None:
    flags = ["--temperature", "0.5", "--top-p", "0.25", "--top-k", "7", "--min-p", "0.125", "--seed", "0"]
    flags += ["--repetition-penalty", "1.5", "--presence-penalty", "-0.5", "--frequency-penalty", "0.75"]
    flags += ["--max-new-tokens", "9", "--stop", "x", "--stop", "y z", "--n", "2", "--adapter", "traffic"]
    result = framesieve("ask", "?", "--server", address, *flags, "--json", "--top-logprobs", "2")
    assert result.exit_code == 0, result.stderr
    framesieve("ask", "?", "--server", address)
    asked, plain = services.asked
    assert asked.sampling == generation_pb2.Sampling(
        temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, seed=0, repetition_penalty=1.5, presence_penalty=-0.5,
        frequency_penalty=0.75, max_new_tokens=9, stop=["x", "y z"], n=2, logprobs=True, top_logprobs=2,
    )  # fmt: skip
    assert asked.adapter == "traffic"
    assert plain.sampling == generation_pb2.Sampling()
    assert not plain.HasField("adapter")


def test_json_is_one_object_with_all_completions(framesieve: Run, address: str, clip: str) -> None:
    result = framesieve("ask", clip, "What moves?", "--server", address, "--n", "2", "--json")
    assert result.stderr == ""
    printed = json.loads(result.stdout)
    assert (printed["answer"], printed["finish_reason"]) == ("A red ball ⚽", "stop")
    assert printed["choices"] == [
        {"answer": "A red ball ⚽", "finish_reason": "stop"},
        {"answer": "Something", "finish_reason": "stop"},
    ]
    assert (printed["usage"]["prompt_tokens_full"], printed["usage"]["completion_tokens"]) == (12, 4)
    assert printed["usage"]["media"][0] == {
        "modality": "video", "grid": {"t": 2, "h": 2, "w": 2}, "kept_tokens": 4,
        "repaired_frames": 3, "first_slice_only": True,
    }  # fmt: skip
    assert printed["timings"]["decode_s"] == 0.5


@pytest.mark.parametrize(("count", "beside"), [("0", []), ("2", [{"token_id": 9, "logprob": -1.5}])])
def test_json_has_log_probabilities_on_request(
    framesieve: Run, address: str, count: str, beside: list[dict[str, float]]
) -> None:
    printed = json.loads(framesieve("ask", "?", "--server", address, "--json", "--top-logprobs", count).stdout)
    [choice] = printed["choices"]
    for token_id, token in zip((1, 2), choice["tokens"], strict=True):
        own = {"token_id": token_id, "logprob": -0.5}
        assert token == {**own, "top_logprobs": [own, *beside] if beside else []}


# --- errors -----------------------------------------------------------------------------------------------------


def test_an_error_of_the_service_is_one_line_that_begins_with_its_reason(
    framesieve: Run, services: FakeServices, address: str, clip: str
) -> None:
    services.refusal = MediaDamaged("12 of 40 frames [0.30] cannot be decoded")
    result = framesieve("ask", clip, "?", "--server", address)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "MEDIA_DAMAGED: 12 of 40 frames [0.30] cannot be decoded\n"


@pytest.mark.parametrize("command", [("ask", "?"), ("bench",)])
def test_an_address_without_a_server_is_reported_with_how_to_start_one(
    framesieve: Run, tmp_path: Path, command: Sequence[str]
) -> None:
    result = framesieve(*command, "--server", f"unix:{tmp_path}/nothing.sock")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "framesieve serve" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["clip.mp4", "?", "--max-frames", str(2**33)], "INVALID_REQUEST: FrameSampling.max_frames must be a 32-bit"),
        (["?", "--stop", "\udcff"], r"INVALID_REQUEST: Sampling.stop must be text in Unicode, got ['\udcff']"),
        (["no.mp4", "?"], "FILE: no.mp4: No such file or directory"),
    ],
)
def test_an_error_of_the_client_is_one_line(
    framesieve: Run, address: str, clip: str, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(Path(clip).parent)
    result = framesieve("ask", *arguments, "--server", address)
    assert result.exit_code == 1
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ask",), "Missing argument"),
        (("ask", "?", "--pruning-rate", "1"), "below 1"),
        (("ask", "?", "--pruning-rate", "nan"), "nan"),
        (("ask", "?", "--method", "magic"), "evs, vidcom2"),
        (("ask", "?", "--top-logprobs", "2"), "--json"),
        (("inspect", "clip.mp4", "--encoder", "localhost:1"), "--preprocessing"),
        (("serve", "--no-such-flag"), "--no-such-flag"),
    ],
)
def test_wrong_usage_exits_with_2(framesieve: Run, arguments: tuple[str, ...], words: str) -> None:
    result = framesieve(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize("command", ["serve", "ask", "inspect", "bench", "capacity"])
def test_help_has_an_example_and_says_what_each_method_keeps(framesieve: Run, command: str) -> None:
    printed = framesieve(command, "--help").stdout
    assert f"Example: framesieve {command}" in printed
    if command in ("ask", "inspect"):
        assert [method for method in METHODS if f"{method}: " not in printed] == []


@pytest.mark.parametrize("before", [(), SIGINT_IGNORED], ids=["foreground", "SIGINT inherited as ignored"])
def test_ctrl_c_exits_with_130_and_cancels_the_request(
    services: FakeServices, address: str, clip: str, before: Sequence[str]
) -> None:
    services.hang.set()
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*before, *COMMAND, "ask", clip, "?", "--server", address], **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(6) == b"A red "
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert b"Traceback" not in process.stderr.read()
    assert services.cancelled.wait(20)
