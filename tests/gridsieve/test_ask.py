"""`gridsieve ask` against hand-written services: what it sends, what it prints where, and how it exits."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from typer.testing import Result

from gridsieve.common.contract.errors import MediaDamaged, PromptTooLong
from gridsieve.common.contract.limits import LARGER_FILES
from gridsieve.common.contract.retention import METHODS
from gridsieve.v1 import generation_pb2, prompt_pb2
from tests.certificates import Authority
from tests.gridsieve.conftest import COMMAND, SIGINT_IGNORED
from tests.gridsieve.fake_services import FakeServices

Run = Callable[..., Result]


def test_the_completion_is_printed_to_stdout_and_its_cost_to_stderr(gridsieve: Run, address: str, clip: str) -> None:
    result = gridsieve("ask", clip, "What moves?", "--pruning-rate", "0.75", "--server", address)
    assert result.exit_code == 0
    assert result.stdout == "A red ball ⚽\n"
    prompt = "12 → 8 prompt tokens, kept 4 of 8 tokens of media (50% dropped)"
    assert f"{prompt} · 2 tokens in 0.75 s, the first after 0.50 s" in result.stderr
    assert "3 damaged frames" in result.stderr
    assert "sees no motion" in result.stderr


def test_media_and_their_flags_are_sent(
    gridsieve: Run, services: FakeServices, address: str, clip: str, tmp_path: Path
) -> None:
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(b"photo")
    url = "https://a.test//clip.mp4?x=1"
    flags = ["--pruning-rate", "0.5", "--pruning-method", "random", "--fps", "4", "--max-frames", "16"]
    gridsieve("ask", clip, str(photo), url, "What differs?", *flags, "--server", address)
    gridsieve("ask", "films/a.mp4", url, "?", "--on-server", "--server", address)
    first, on_server = services.asked
    video, image, fetched, text = first.prompt.messages[0].parts
    assert (video.video.data, image.video.data, text.text) == (b"film", b"photo", "What differs?")
    for part in (video, fetched):
        assert (part.video.frame_sampling.fps, part.video.frame_sampling.max_frames) == (4, 16)
    assert (first.pruning.rate, first.pruning.method) == (0.5, "random")
    path, fetched_too, _ = on_server.prompt.messages[0].parts
    assert (path.video.path, fetched.video.url, fetched_too.video.url) == ("films/a.mp4", url, url)


def test_sampling_flags_are_sent_and_unset_ones_leave_the_models_defaults(
    gridsieve: Run, services: FakeServices, address: str
) -> None:
    flags = ["--temperature", "0.5", "--top-p", "0.25", "--top-k", "7", "--min-p", "0.125", "--seed", "0"]
    flags += ["--repetition-penalty", "1.5", "--presence-penalty", "-0.5", "--frequency-penalty", "0.75"]
    flags += ["--max-new-tokens", "9", "--stop", "x", "--stop", "y z", "--adapter", "traffic"]
    flags += ["--no-thinking"]
    result = gridsieve("ask", "?", "--server", address, *flags, "--json", "--top-logprobs", "2")
    assert result.exit_code == 0, result.stderr
    gridsieve("ask", "?", "--server", address)
    asked, plain = services.asked
    assert asked.sampling == generation_pb2.Sampling(
        temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, seed=0, repetition_penalty=1.5, presence_penalty=-0.5,
        frequency_penalty=0.75, max_new_tokens=9, stop=["x", "y z"], logprobs=True, top_logprobs=2,
    )  # fmt: skip
    assert asked.adapter == "traffic"
    assert json.loads(asked.prompt.template_options) == {"enable_thinking": False}
    assert (plain.sampling, plain.pruning) == (generation_pb2.Sampling(), prompt_pb2.Pruning())
    assert not plain.HasField("adapter")
    assert not plain.prompt.template_options


def test_json_is_one_object(gridsieve: Run, address: str, clip: str) -> None:
    result = gridsieve("ask", clip, "What moves?", "--server", address, "--json")
    assert result.stderr == ""
    printed = json.loads(result.stdout)
    assert (printed["answer"], printed["finish_reason"]) == ("A red ball ⚽", "stop")
    assert (printed["usage"]["prompt_tokens_full"], printed["usage"]["completion_tokens"]) == (12, 2)
    assert printed["usage"]["media"][0] == {
        "modality": "video", "grid": {"t": 2, "h": 2, "w": 2}, "num_kept": 4,
        "repaired_frames": 3, "first_slice_only": True, "missing_frames": 0, "dropped_frames": 0, "pruning_rate": 0.5,
        "sampling_mode": "", "sampled_frames": 0, "heard_s": 0.0,
    }  # fmt: skip
    assert printed["timings"]["decode_s"] == 0.5


def test_json_has_log_probabilities_on_request(gridsieve: Run, address: str) -> None:
    printed = json.loads(gridsieve("ask", "?", "--server", address, "--json", "--top-logprobs", "2").stdout)
    own = {"token_id": 1, "text": "A red ", "logprob": -0.5}
    first, _ = printed["tokens"]
    assert first == {**own, "top_logprobs": [own, {"token_id": 9, "text": "nine", "logprob": -1.5}]}
    printed = json.loads(gridsieve("ask", "?", "--server", address, "--json", "--top-logprobs", "0").stdout)
    assert printed["tokens"][0] == {**own, "top_logprobs": []}


# --- errors -----------------------------------------------------------------------------------------------------


def test_an_error_of_the_service_is_one_line_that_begins_with_its_reason(
    gridsieve: Run, address: str, clip: str
) -> None:
    result = gridsieve("ask", clip, "refuse", "--server", address)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "MEDIA_DAMAGED: 12 of 40 frames [0.30] cannot be decoded\n"


def test_an_address_without_a_server_is_reported_with_how_to_start_one(gridsieve: Run, tmp_path: Path) -> None:
    result = gridsieve("ask", "?", "--server", f"unix:{tmp_path}/nothing.sock")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "gridsieve serve" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [("ask", "no.mp4", "?"), ("chat", "no.mp4")])
def test_a_missing_file_is_named_in_one_line(gridsieve: Run, address: str, arguments: tuple[str, ...]) -> None:
    result = gridsieve(*arguments, "--server", address)
    assert (result.exit_code, result.stderr) == (1, "FILE: no.mp4: No such file or directory\n")


def test_a_deadline_that_passed_names_its_flag(gridsieve: Run, services: FakeServices, address: str) -> None:
    result = gridsieve("ask", "hang", "--timeout-s", "0.5", "--server", address)
    assert result.exit_code == 1
    assert "DEADLINE_PASSED: the deadline passed before generation finished (--timeout-s)\n" in result.stderr
    assert services.cancelled.wait(20)


def test_an_address_of_something_else_is_reported_with_what_to_change(gridsieve: Run, tmp_path: Path) -> None:
    Authority(tmp_path)
    server, thread = start_http_server(0, "127.0.0.1", CollectorRegistry())
    address = f"127.0.0.1:{server.server_port}"
    try:
        no_grpc = gridsieve("ask", "?", "--server", address)
        no_tls = gridsieve("ask", "?", "--server", address, "--tls-ca", str(tmp_path / "ca.pem"))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert no_grpc.stderr.startswith(f"UNAVAILABLE: {address} is not a gRPC server")
    assert no_tls.stderr == f"UNAVAILABLE: {address} does not use TLS: leave out --tls-ca\n"
    with_scheme = gridsieve("ask", "?", "--server", f"http://{address}")
    assert "must be host:port without http://" in with_scheme.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ask", "?", "--pruning-rate", "1"), "--pruning-rate must be at least 0 and below 1, got 1.0"),
        (
            ("ask", "?", "--pruning-method", "magic"),
            f"--pruning-method must be one of {', '.join(METHODS)}, got 'magic'",
        ),
        (
            ("ask", "?", "--pruning-method", "evs", "--pruning-threshold", "0.04"),
            "--pruning-threshold is for pixel_change, the method is evs",
        ),
        (("chat", "--pruning-threshold", "1"), "--pruning-threshold must be at least 0 and below 1, got 1.0"),
        (("ask", "?", "--top-logprobs", "2"), "--json"),
        (("ask", "clip.mp4"), "add a question"),
        (("ask", "clip.mp4", " "), "the question is empty"),
        (("ask",), 'a question is missing: gridsieve ask clip.mp4 "What moves?"'),
        (("ask", "s3://bucket/clip.mp4", "?"), "has the scheme s3"),
        (("inspect", "clip.mp4", "--encoder", "localhost:1"), "--preprocessing"),
        (("inspect", "clip.mp4", "-o", "kept.gif"), "must end with .png, .jpg"),
    ],
)
def test_wrong_usage_exits_with_2(gridsieve: Run, arguments: tuple[str, ...], words: str) -> None:
    result = gridsieve(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in " ".join(result.stderr.replace("│", " ").split())


def test_several_questions_are_asked_in_turn_about_the_same_part_of_the_clip(
    gridsieve: Run, services: FakeServices, address: str, clip: str
) -> None:
    flags = ["--system", "Be brief.", "--start-s", "1", "--end-s", "2.5", "--max-pixels", "4000", "--allow-truncated"]
    flags += ["--num-frames", "8", "--mode", "keyframes"]
    result = gridsieve("ask", clip, "-q", "What moves?", "-q", "And then?", *flags, "--server", address)
    assert result.stdout == "A red ball ⚽\nA red ball ⚽\n"
    for asked, question in zip(services.asked, ("What moves?", "And then?"), strict=True):
        system, user = asked.prompt.messages
        assert [part.text for part in system.parts] == ["Be brief."]
        sampling = user.parts[0].video.frame_sampling
        assert (sampling.start_s, sampling.end_s, sampling.max_pixels, sampling.allow_truncated) == (1, 2.5, 4000, True)
        assert (sampling.num_frames, sampling.mode, sampling.HasField("fps")) == (8, "keyframes", False)
        assert user.parts[1].text == question
    assert gridsieve("ask", "-q", "What is a video?", "--server", address).stdout == "A red ball ⚽\n"
    printed = json.loads(gridsieve("ask", clip, "-q", "1?", "-q", "2?", "--server", address, "--json").stdout)
    assert [each["question"] for each in printed["answers"]] == ["1?", "2?"]


def test_with_json_an_error_is_json_on_stdout_and_names_the_file_and_the_flag(
    gridsieve: Run, services: FakeServices, address: str, clip: str
) -> None:
    field = "prompt.messages[0].parts[0].video.frame_sampling.fps"
    services.refusal = MediaDamaged(field=field, limit="above 0", value=-1)
    result = gridsieve("ask", clip, "refuse", "--server", address, "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    message = f"--fps of {clip} must be above 0, got -1"
    assert json.loads(result.stdout) == {"error": {"reason": "MEDIA_DAMAGED", "message": message}}


@pytest.mark.parametrize(
    ("remedy", "words"),
    [
        (
            "`frame_sampling.max_pixels` 784, or `frame_sampling.fps` 0.5 would fit",
            "--max-pixels 784, or --fps 0.5 would fit",
        ),
        (LARGER_FILES, "send a larger file as a path below --media-root with --on-server, or as a URL"),
    ],
)
def test_a_remedy_is_told_in_flags(
    gridsieve: Run, services: FakeServices, address: str, clip: str, remedy: str, words: str
) -> None:
    services.refusal = PromptTooLong("the prompt is too long", remedy=remedy)
    result = gridsieve("ask", clip, "refuse", "--server", address)
    assert result.stderr == f"PROMPT_TOO_LONG: the prompt is too long; {words}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "no.mp4", "--preprocessing", "127.0.0.1:1", "--encoder", "127.0.0.1:1"),
        ("bench", "--workload", "no.mp4", "--server", "127.0.0.1:1"),
    ],
)
def test_every_command_reports_an_error_as_json_on_request(gridsieve: Run, arguments: tuple[str, ...]) -> None:
    result = gridsieve(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    message = "no.mp4: No such file or directory"
    assert json.loads(result.stdout) == {"error": {"reason": "FILE", "message": message}}


def test_a_conversation_keeps_its_media_questions_and_answers(services: FakeServices, address: str, clip: str) -> None:
    command = [*COMMAND, "chat", clip, "--system", "Be brief.", "--server", address]
    result = subprocess.run(command, input="What moves?\n\nAnd then?\n", capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "A red ball ⚽\nA red ball ⚽\n")
    first, second = (asked.prompt.messages for asked in services.asked)
    assert [message.role for message in second] == [1, 2, 3, 2]
    assert list(second[:2]) == list(first)
    assert [part.text for message in second[2:] for part in message.parts] == ["A red ball ⚽", "And then?"]


def test_ctrl_c_exits_with_130_and_cancels_the_request_even_if_it_was_inherited_as_ignored(
    services: FakeServices, address: str, clip: str
) -> None:
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*SIGINT_IGNORED, *COMMAND, "ask", clip, "hang", "--server", address], **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(6) == b"A red "
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert b"Traceback" not in process.stderr.read()
    assert services.cancelled.wait(20)
