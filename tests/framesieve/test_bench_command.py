"""`framesieve bench` against a hand-written service: what it sends, what it reports, and how it exits."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

from common.contract.errors import MediaRejected
from common.serving.status import DETAILS_KEY, status_details
from framesieve.__main__ import app
from framesieve.v1 import generation_pb2, generation_pb2_grpc
from tests.framesieve.conftest import COMMAND, SIGINT_IGNORED


class FakeGeneration(generation_pb2_grpc.GenerationServiceServicer):
    """Sends three tokens in two messages; rejects the text "refuse" and never answers the text "hang".

    crowd: all requests but the first `uncrowded` wait until this many have run at the same time.
    """

    def __init__(self) -> None:
        self.crowd, self.uncrowded = 1, 0
        self.asked: list[Any] = []
        self.running = 0
        self.most_running = 0
        self.lock = threading.Condition()
        self.hung = threading.Event()

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:
        text = request.prompt.messages[0].parts[-1].text
        with self.lock:
            self.asked.append(request)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            self.lock.notify_all()
            if len(self.asked) > self.uncrowded:
                self.lock.wait_for(lambda: self.most_running >= self.crowd, 20)
        gone = threading.Event()
        context.add_callback(gone.set)
        if text == "refuse":
            refusal = MediaRejected("no video in 4 bytes")
            context.set_trailing_metadata(((DETAILS_KEY, status_details(refusal).SerializeToString()),))
            self.running -= 1
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refusal))
        if text == "hang":
            self.hung.set()
            gone.wait(20)
        usage = generation_pb2.Usage(
            prompt_tokens_full=100, prompt_tokens=40, completion_tokens=3, cached_prompt_tokens=10
        )
        yield generation_pb2.GenerateResponse(accepted=generation_pb2.Accepted(request_id="r", usage=usage))
        time.sleep(0.02)
        yield generation_pb2.GenerateResponse(delta=generation_pb2.Delta(text="A", token_ids=[1]))
        yield generation_pb2.GenerateResponse(delta=generation_pb2.Delta(text="B", token_ids=[2, 3]))
        with self.lock:
            self.running -= 1
        timings = generation_pb2.Timings(time_to_first_token_s=0.5, decode_s=0.5, generate_s=0.25)
        finished = generation_pb2.Finished(reason=generation_pb2.FINISH_REASON_STOP, usage=usage, timings=timings)
        yield generation_pb2.GenerateResponse(finished=finished)


@pytest.fixture
def service() -> FakeGeneration:
    return FakeGeneration()


@pytest.fixture
def address(service: FakeGeneration, tmp_path: Path) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(16))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
    server.add_insecure_port(f"unix:{tmp_path}/generation.sock")
    server.start()
    yield f"unix:{tmp_path}/generation.sock"
    server.stop(0).wait()


@pytest.fixture
def bench(address: str) -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["bench", "--server", address, *arguments])

    return run


def workload(folder: Path, *lines: dict[str, Any]) -> str:
    path = folder / "load.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_a_closed_loop_is_reported(bench: Callable[..., Result], service: FakeGeneration) -> None:
    service.crowd, service.uncrowded = 3, 2
    result = bench("--clients", "3", "--requests", "12", "--warmup", "2", "--json", "--records")
    assert (result.exit_code, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert len(service.asked) == 14
    assert service.most_running == 3
    assert (report["all"]["asked"], report["all"]["answered"], report["all"]["failed"]) == (12, 12, 0)
    assert report["all"]["retained"] == 0.4
    assert report["all"]["cached_prompt_tokens"] == 12 * 10
    assert report["all"]["first_token_s"]["p50"] >= 0.02
    assert report["requests_per_s"] == pytest.approx(12 / report["wall_s"])
    assert report["output_tokens_per_s"] == pytest.approx(36 / report["wall_s"])
    assert sorted(record["number"] for record in report["records"]) == list(range(12))
    assert all(len(record["token_gaps_s"]) == 2 for record in report["records"])
    assert report["run"]["command"].endswith("--clients 3 --requests 12 --warmup 2 --json --records")
    assert report["run"]["load"] == "3 clients in a closed loop, 12 requests"
    assert "each new to every cache" in report["run"]["media"]


def test_pruning_and_sampling_flags_are_sent(bench: Callable[..., Result], service: FakeGeneration) -> None:
    rates = ["--pruning-rate", "0", "--pruning-rate", "0.75", "--method", "vidcom2"]
    bench("--clients", "1", "--requests", "4", "--warmup", "0", *rates, "--max-new-tokens", "9", "--ignore-eos")
    assert [request.pruning.rate for request in service.asked] == [0, 0.75, 0, 0.75]
    assert {request.pruning.method for request in service.asked} == {"vidcom2"}
    assert {request.sampling.max_new_tokens for request in service.asked} == {9}
    assert {request.sampling.ignore_eos for request in service.asked} == {True}
    films = {request.prompt.messages[0].parts[0].video.data for request in service.asked}
    assert len(films) == 4
    report = json.loads(bench("--requests", "20", "--warmup", "0", "--repeat", "--json").stdout)
    assert len({request.prompt.messages[0].parts[0].video.data for request in service.asked[4:]}) == 4
    assert "repeat and hit caches" in report["run"]["media"]
    assert not any(request.sampling.ignore_eos for request in service.asked[4:])


def test_arrivals_do_not_wait_for_completions_and_can_be_plotted(
    bench: Callable[..., Result], service: FakeGeneration, tmp_path: Path
) -> None:
    service.crowd = 5
    flags = ("--rate", "400", "--requests", "40", "--warmup", "0", "--plot", str(tmp_path / "load.png"))
    report = json.loads(bench(*flags, "--json").stdout)
    assert (tmp_path / "load.png").exists()
    assert service.most_running > 4
    assert report["all"]["answered"] == 40
    assert report["run"]["load"] == "400 Poisson arrivals a second, seed 0, 40 requests"


def test_the_table_shows_the_run_and_its_errors(bench: Callable[..., Result], tmp_path: Path) -> None:
    path = workload(tmp_path, {"question": "What moves?", "weight": 2}, {"question": "refuse", "pruning_rate": 0.5})
    result = bench("--workload", path, "--requests", "6", "--warmup", "3", "--clients", "2")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("framesieve bench --server unix:")
    assert "warmup:  3 requests, uncounted, of which 1 failed" in lines
    assert any(line.startswith("4 answered, 2 failed in ") for line in lines)
    assert "  2 × INVALID_ARGUMENT MEDIA_REJECTED: no video in 4 bytes" in lines


def test_a_request_past_its_deadline_fails(bench: Callable[..., Result], tmp_path: Path) -> None:
    path = workload(tmp_path, {"question": "hang"})
    result = bench("--workload", path, "--requests", "2", "--warmup", "0", "--timeout-s", "0.2", "--json")
    assert result.exit_code == 1
    (error,) = json.loads(result.stdout)["errors"]
    assert (error["status"], error["count"]) == ("DEADLINE_EXCEEDED", 2)


def test_ctrl_c_ends_the_run_early_and_still_reports(service: FakeGeneration, address: str, tmp_path: Path) -> None:
    lines = [{"question": "?", "weight": 5}, {"question": "hang"}]
    path = workload(tmp_path, *lines)
    arguments = ["bench", "--server", address, "--workload", path, "--clients", "1", "--warmup", "0", "--json"]
    with subprocess.Popen([*SIGINT_IGNORED, *COMMAND, *arguments], stdout=subprocess.PIPE) as process:
        assert service.hung.wait(20)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        report = json.loads(process.communicate(timeout=60)[0])
        assert process.returncode == 130
    assert report["interrupted"]
    assert (report["all"]["answered"], report["abandoned"]) == (len(service.asked) - 1, 1)
    assert report["all"]["answered"] > 0


def test_a_missing_extra_is_reported_before_any_request(
    bench: Callable[..., Result], service: FakeGeneration, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = bench("--plot", str(tmp_path / "load.png"))
    assert (result.exit_code, service.asked) == (1, [])
    assert "pip install -e '.[plot]'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--clients", "2", "--rate", "3"], "--clients and --rate exclude each other"),
        (["--model", "here"], "--server and --model exclude each other"),
        (["--duration-s", "nan"], "--duration-s must be above 0"),
        (["--pruning-rate", "1"], "below 1, got 1.0"),
        (["--on-server"], "--on-server needs --workload"),
        (["--records"], "--records needs --json"),
        (["--plot", "no/such/folder/load.png"], "no/such/folder"),
    ],
)
def test_wrong_usage_exits_with_2(bench: Callable[..., Result], arguments: list[str], words: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())


def test_an_invalid_workload_line_is_wrong_usage(bench: Callable[..., Result], tmp_path: Path) -> None:
    result = bench("--workload", workload(tmp_path, {"question": "?", "pruning_rate": 2}))
    assert result.exit_code == 2
    assert "line 1: pruning_rate" in " ".join(result.stderr.replace("│", " ").split())
