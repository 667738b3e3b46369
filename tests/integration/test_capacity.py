"""`framesieve capacity` of a bench of three real processes: the plan follows from what they say they spent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from framesieve.cli.launcher import LocalStack

COMMAND = [sys.executable, "-c", "from framesieve.__main__ import app; app()"]
REQUESTS = 8


def run(*arguments: str) -> str:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_load_is_planned_from_what_real_services_spent(stack: LocalStack, tmp_path: Path) -> None:
    metrics = [word for port in stack.metrics_ports.values() for word in ("--metrics", f"127.0.0.1:{port}")]
    load = ["--clients", "2", "--requests", str(REQUESTS), "--warmup", "2", "--max-new-tokens", "8", "--ignore-eos"]
    result = tmp_path / "bench.json"
    result.write_text(run("bench", "--server", stack.address, *metrics, *load, "--json"))
    measured = json.loads(result.read_text())
    services = {each["service"]: each for each in measured["services"]}
    assert services.keys() == {"preprocessing", "encoder", "generation"}
    assert services["preprocessing"]["workers"] >= 1
    wall_s = measured["wall_s"]
    for name, stage, at_once in (
        ("preprocessing", "decode", services["preprocessing"]["workers"]),
        ("encoder", "encode", 1),
        ("generation", "step", 1),
    ):
        # Nobody works for longer than there was time, and nobody was idle: every clip was new to the caches.
        assert 0 < services[name]["busy_s"][stage] <= wall_s * at_once
        assert services[name]["processor_s"] > 0
    # The question goes in with its clip, embeddings go from the encoder to generation.
    assert services["generation"]["received_bytes"] > REQUESTS * 1000
    assert services["encoder"]["sent_bytes"] > services["generation"]["sent_bytes"] > 0

    told = json.loads(run("capacity", str(result), "--requests-per-s", "100", "--json"))
    encode_s = sum(services["encoder"]["busy_s"].values()) / REQUESTS
    assert told["working"]["encoder"]["used"] == pytest.approx(100 * encode_s)
    held_s = measured["all"]["held_s"]
    assert told["kv_cache"]["used"] == pytest.approx(100 * measured["all"]["kv_token_s"])
    # As many as there are, times as long as each is there: between the answer's part of the time and all of it.
    tokens = (measured["all"]["prompt_tokens"] + measured["all"]["completion_tokens"]) / REQUESTS
    assert 0 < told["kv_cache"]["used"] < 100 * held_s * tokens
    assert all(count >= 1 for count in told["replicas"].values())
    assert "replicas:  preprocessing " in run("capacity", str(result), "--requests-per-s", "100")
