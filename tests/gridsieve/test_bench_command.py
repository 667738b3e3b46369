"""`gridsieve bench` against hand-written services: what it sends, what it reports, and how it exits."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from tests.gridsieve.conftest import COMMAND, SIGINT_IGNORED
from tests.gridsieve.fake_services import FakeServices


@pytest.fixture
def bench(gridsieve: Callable[..., Result], address: str) -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        return gridsieve("bench", "--server", address, *arguments)

    return run


def workload(folder: Path, *questions: str) -> str:
    path = folder / "sharegpt.json"
    turns = [[{"from": "human", "value": each}, {"from": "gpt", "value": ""}] for each in questions]
    path.write_text(json.dumps([{"conversations": each} for each in turns]))
    return str(path)


def test_a_closed_loop_is_reported(bench: Callable[..., Result], services: FakeServices) -> None:
    result = bench("--clients", "3", "--requests", "12", "--warmup", "2", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert len(services.asked) == 14
    (load,) = report["by_pruning"]
    assert (load["asked"], load["answered"], load["failed"]) == (12, 12, 0)
    assert load["retained"] == pytest.approx(8 / 12)
    assert load["requests_per_s"] == pytest.approx(12 / load["wall_s"])
    assert load["output_tokens_per_s"] == pytest.approx(24 / load["wall_s"])
    assert load["total_tokens_per_s"] == pytest.approx((12 * 8 + 24) / load["wall_s"])
    assert 1 <= load["peak_concurrent_requests"] <= 3
    assert report["run"]["command"].endswith("--clients 3 --requests 12 --warmup 2 --json")
    assert report["run"]["load"] == "3 clients in a closed loop, 12 requests"
    assert "all different" in report["run"]["media"]
    assert report["run"]["pruning"] == f"by {services.methods[-1]}"  # which the service tells
    assert {request.pruning.method for request in services.asked} == {services.methods[-1]}


def test_a_threshold_is_sent_with_the_method_that_has_it(
    bench: Callable[..., Result], services: FakeServices, tmp_path: Path
) -> None:
    load = ["--workload", workload(tmp_path, "?"), "--clients", "1", "--requests", "1", "--warmup", "0"]
    flags = [*load, "--pruning-threshold", "0.04"]
    told = json.loads(bench(*flags, "--json").stdout)
    (request,) = services.asked
    assert (request.pruning.method, request.pruning.threshold) == ("pixel_change", 0.04)
    assert told["by_pruning"][0]["pruning_threshold"] == 0.04
    assert told["run"]["pruning"] == "by pixel_change, threshold 0.04"


def test_pruning_and_sampling_flags_are_sent(bench: Callable[..., Result], services: FakeServices) -> None:
    rates = ["--pruning-rate", "0", "--pruning-rate", "0.75", "--pruning-method", "vidcom2"]
    flags = ["--clients", "1", "--requests", "2", "--warmup", "1", *rates, "--max-new-tokens", "9", "--ignore-eos"]
    told = json.loads(bench(*flags, "--json").stdout)
    assert [request.pruning.rate for request in services.asked] == [0, 0, 0, 0.75, 0.75, 0.75]
    assert [(each["pruning_rate"], each["asked"]) for each in told["by_pruning"]] == [(0, 2), (0.75, 2)]
    assert told["run"]["warmup"] == "1 requests at each rate, not counted, 0 of them failed"
    questions = [request.prompt.messages[0].parts[1].text for request in services.asked]
    assert questions[:3] == questions[3:]
    assert {request.pruning.method for request in services.asked} == {"vidcom2"}
    assert {request.sampling.max_new_tokens for request in services.asked} == {9}
    assert {request.sampling.ignore_eos for request in services.asked} == {True}
    films = {request.prompt.messages[0].parts[0].video.data for request in services.asked}
    assert len(films) == 6


def test_arrivals_wait_for_no_completion_and_may_pass_their_deadline(
    bench: Callable[..., Result], services: FakeServices, tmp_path: Path
) -> None:
    path = workload(tmp_path, "hang", "?")
    flags = ("--request-rate", "400", "--requests", "4", "--warmup", "0", "--timeout-s", "1.5", "--workload", path)
    report = json.loads(bench(*flags, "--json").stdout)
    assert services.most_running > 1
    (load,) = report["by_pruning"]
    assert load["answered"] == 2
    (error,) = load["failures"]
    assert (error["status"], error["count"]) == ("DEADLINE_EXCEEDED", 2)
    assert report["run"]["load"] == "400 Poisson arrivals a second, 4 requests"
    assert report["run"]["media"] == f"{path}; repeated media may hit caches"


def test_the_table_shows_the_run_and_its_errors(bench: Callable[..., Result], tmp_path: Path) -> None:
    path = workload(tmp_path, "What moves?", "What moves?", "refuse")
    result = bench("--workload", path, "--requests", "6", "--warmup", "3", "--clients", "2")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("gridsieve bench --server unix:")
    assert "warmup:  3 requests, not counted, 1 of them failed" in lines
    assert "rate 0, vcast: 2 × INVALID_ARGUMENT MEDIA_DAMAGED: 12 of 40 frames [0.30] cannot be decoded" in lines
    rows = [line.split() for line in lines]
    assert ["Successful", "requests:", "4"] in rows
    assert ["Failed", "requests:", "2"] in rows


def test_a_run_without_an_answer_exits_with_1(bench: Callable[..., Result], tmp_path: Path) -> None:
    path = workload(tmp_path, "refuse")
    assert bench("--workload", path, "--requests", "2", "--warmup", "0", "--json").exit_code == 1


def test_ctrl_c_ends_the_run_early_and_still_reports(services: FakeServices, address: str, tmp_path: Path) -> None:
    path = workload(tmp_path, *["?"] * 5, "hang")
    arguments = ["bench", "--server", address, "--workload", path, "--clients", "1", "--warmup", "0", "--json"]
    with subprocess.Popen([*SIGINT_IGNORED, *COMMAND, *arguments], stdout=subprocess.PIPE) as process:
        assert services.hangs.wait(20)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        report = json.loads(process.communicate(timeout=60)[0])
        assert process.returncode == 130
    assert report["interrupted"]
    (load,) = report["by_pruning"]
    assert (load["answered"], report["abandoned"]) == (len(services.asked) - 1, 1)
    assert load["answered"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--clients", "2", "--request-rate", "3"], "--clients and --request-rate exclude each other"),
        (["--model", "here"], "--server and --model exclude each other"),
        (["--request-rate", "nan"], "--request-rate must be above 0"),
    ],
)
def test_wrong_usage_exits_with_2(bench: Callable[..., Result], arguments: list[str], words: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())
