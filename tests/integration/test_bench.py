"""`gridsieve bench` against real services, by gRPC and by HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gridsieve.__main__ import app
from gridsieve.common.process import free_port
from tests import media
from tests.integration.fleet import Stack
from tests.integration.gateway import Gateway


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_a_mixed_workload_is_measured_and_only_a_file_that_is_no_video_fails(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(media.clip())
    (tmp_path / "noise.mp4").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "photo.png").write_bytes(media.picture(112, 112))
    lines: list[dict[str, Any]] = [
        {"video": "clip.mp4", "question": "What moves?", "weight": 2},
        {"image": "photo.png", "question": "What is it?"},
        {"video": "noise.mp4", "question": "What moves?"},
    ]
    workload = tmp_path / "load.jsonl"
    workload.write_text("\n".join(map(json.dumps, lines)))
    asked = ["--server", stack.address, "--workload", str(workload), "--pruning-rate", "0", "--pruning-rate", "0.5"]
    load = ["--clients", "4", "--requests", "8", "--warmup", "2", "--max-new-tokens", "4"]
    plain, pruned = json.loads(run("bench", *asked, *load, "--json", "--records"))["by_pruning"]
    for each in (plain, pruned):
        assert (each["asked"], each["answered"], each["failed"]) == (8, 6, 2)
        (error,) = each["failures"]
        assert (error["status"], error["reason"], error["count"]) == ("INVALID_ARGUMENT", "MEDIA_REJECTED", 2)
        for record in (one for one in each["records"] if one["error"] is None):
            assert len(record["token_gaps_s"]) < record["completion_tokens"] == 4
            # The client also measures the way there and back.
            served_s = record["timings"]["time_to_first_token_s"]
            assert served_s <= record["first_token_s"] <= record["total_s"] <= each["wall_s"]
    assert plain["retained"] == 1
    assert plain["prompt_tokens_full"] == pruned["prompt_tokens_full"] > pruned["prompt_tokens"]


@pytest.fixture(scope="module")
def sharegpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clips and a picture."""
    folder = tmp_path_factory.mktemp("sharegpt")
    entries = []
    for index, (field, name, file) in enumerate(
        (
            ("video", "still.mp4", media.clip()),
            ("video", "other.mp4", media.clip(8, seed=1)),
            ("image", "photo.png", media.picture(112, 112)),
        )
    ):
        (folder / name).write_bytes(file)
        turns = [{"from": "human", "value": f"<{field}>\nWhat moves?"}, {"from": "gpt", "value": "Nothing."}]
        entries.append({"id": str(index), "conversations": turns, field: name})
    path = folder / "sharegpt.json"
    path.write_text(json.dumps(entries))
    return path


SHAREGPT_LOAD = ["--request-rate", "20", "--requests", "6", "--warmup", "0", "--max-new-tokens", "4", "--ignore-eos"]


def test_a_sharegpt_file_costs_the_same_tokens_by_http_as_by_grpc(stack: Stack, door: Gateway, sharegpt: Path) -> None:
    asked = ["--workload", str(sharegpt), "--pruning-rate", "0", "--pruning-rate", "0.5", *SHAREGPT_LOAD, "--json"]
    http = json.loads(run("bench", "--base-url", door.url, *asked))["by_pruning"]
    grpc = json.loads(run("bench", "--server", stack.address, *asked))["by_pruning"]
    for name in ("answered", "prompt_tokens_full", "prompt_tokens", "completion_tokens", "retained"):
        assert [each[name] for each in http] == [each[name] for each in grpc]
    for each in http:
        assert (each["answered"], each["completion_tokens"]) == (6, 6 * 4)
        assert 0 < each["first_token_s"]["p50"] <= each["total_s"]["p50"] < each["wall_s"]
        assert sum(each["stages_s"].values()) > 0
    assert http[0]["prompt_tokens_full"] > http[1]["prompt_tokens"]


def test_failures_by_http_have_status_and_code_and_a_missing_server_is_told(door: Gateway, sharegpt: Path) -> None:
    (sharegpt.parent / "noise.mp4").write_bytes(bytes(range(256)) * 40)
    workload = sharegpt.parent / "noise.jsonl"
    workload.write_text(json.dumps({"video": "noise.mp4", "question": "?"}))
    asked = ["bench", "--workload", str(workload), "--requests", "2", "--warmup", "1", "--json"]
    done = CliRunner().invoke(app, [*asked, "--base-url", f"{door.url}/v1"])
    (error,) = json.loads(done.stdout)["by_pruning"][0]["failures"]
    assert (error["status"], error["reason"], error["count"]) == ("HTTP 400", "MEDIA_REJECTED", 2)
    nobody = f"http://127.0.0.1:{free_port()}"
    gone = CliRunner().invoke(app, [*asked, "--base-url", nobody])
    told = json.loads(gone.stdout)["error"]
    assert (gone.exit_code, told["reason"]) == (1, "UNAVAILABLE")
    assert told["message"].startswith(f"no server answers at {nobody}")


def test_the_cost_of_a_load_is_read_from_the_services_metrics(stack: Stack) -> None:
    metrics = [word for port in stack.metrics_ports.values() for word in ("--metrics", f"127.0.0.1:{port}")]
    load = ["--clients", "2", "--requests", "8", "--warmup", "2", "--max-new-tokens", "8", "--ignore-eos"]
    (measured,) = json.loads(run("bench", "--server", stack.address, *metrics, *load, "--json"))["by_pruning"]
    services = {each["service"]: each for each in measured["services"]}
    for name, stage in (("preprocessing", "decode"), ("encoder", "encode"), ("generation", "step")):
        # No stage is busy for longer than the run, and none is idle: no clip is cached.
        assert 0 < services[name]["busy_s"][stage] <= measured["wall_s"] * max(1, services[name]["workers"])
        assert services[name]["processor_s"] > 0
    # Generation receives clips, and embeddings from the encoder.
    assert services["generation"]["received_bytes"] > 8 * 1000
    assert services["encoder"]["sent_bytes"] > services["generation"]["sent_bytes"] > 0
    # The number of tokens times how long each is held: at most all of the time that a request runs.
    tokens = (measured["prompt_tokens"] + measured["completion_tokens"]) / 8
    assert 0 < measured["kv_token_s"] < measured["held_s"] * tokens
