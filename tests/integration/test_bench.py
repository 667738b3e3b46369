"""`framesieve bench` and `framesieve capacity` against three real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from framesieve.cli.launcher import LocalStack
from tests import media

COMMAND = [sys.executable, "-c", "from framesieve.__main__ import app; app()"]


def run(*arguments: str) -> str:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_mixed_workload_is_measured_and_only_a_file_that_is_no_video_fails(stack: LocalStack, tmp_path: Path) -> None:
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
    load = ["--clients", "4", "--requests", "16", "--warmup", "2", "--max-new-tokens", "4"]
    report = json.loads(run("bench", *asked, *load, "--json", "--records"))
    everything, (plain, pruned) = report["all"], report["by_pruning"]
    assert (everything["asked"], everything["answered"], everything["failed"]) == (16, 12, 4)
    (error,) = report["errors"]
    assert (error["status"], error["reason"], error["count"]) == ("INVALID_ARGUMENT", "MEDIA_REJECTED", 4)
    assert (plain["answered"], plain["retained"], pruned["answered"]) == (6, 1, 6)
    assert plain["prompt_tokens_full"] == pruned["prompt_tokens_full"] > pruned["prompt_tokens"]
    for record in (each for each in report["records"] if each["error"] is None):
        assert len(record["token_gaps_s"]) < record["completion_tokens"] == 4
        # The client also measures the way there and back.
        served_s = record["timings"]["time_to_first_token_s"]
        assert served_s <= record["first_token_s"] <= record["total_s"] <= report["wall_s"]


@pytest.mark.deep
def test_bench_can_start_the_services_itself() -> None:
    report = run("bench", "--start", "--requests", "4", "--warmup", "0")
    assert "three services started for this run, with the embedded model" in report
    assert "4 answered, 0 failed" in report


def test_capacity_follows_from_the_time_that_services_spent(stack: LocalStack, tmp_path: Path) -> None:
    metrics = [word for port in stack.metrics_ports.values() for word in ("--metrics", f"127.0.0.1:{port}")]
    load = ["--clients", "2", "--requests", "8", "--warmup", "2", "--max-new-tokens", "8", "--ignore-eos"]
    result = tmp_path / "bench.json"
    result.write_text(run("bench", "--server", stack.address, *metrics, *load, "--json"))
    measured = json.loads(result.read_text())
    services = {each["service"]: each for each in measured["services"]}
    for name, stage in (("preprocessing", "decode"), ("encoder", "encode"), ("generation", "step")):
        # No stage is busy for longer than the run, and none is idle: no clip is cached.
        assert 0 < services[name]["busy_s"][stage] <= measured["wall_s"] * max(1, services[name]["workers"])
        assert services[name]["processor_s"] > 0
    # Generation receives clips, and embeddings from the encoder.
    assert services["generation"]["received_bytes"] > 8 * 1000
    assert services["encoder"]["sent_bytes"] > services["generation"]["sent_bytes"] > 0

    plan = json.loads(run("capacity", str(result), "--requests-per-s", "100", "--json"))
    encode_s = sum(services["encoder"]["busy_s"].values()) / 8
    assert plan["working"]["encoder"]["used"] == pytest.approx(100 * encode_s)
    # The number of tokens times how long each is held: at most all of the time that a request runs.
    everything = measured["all"]
    tokens = (everything["prompt_tokens"] + everything["completion_tokens"]) / 8
    assert 0 < plan["kv_cache"]["used"] < 100 * everything["held_s"] * tokens
    assert all(count >= 1 for count in plan["replicas"].values())
