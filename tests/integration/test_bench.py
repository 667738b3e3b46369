"""`gridsieve bench` against real services."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from gridsieve.__main__ import app
from tests import media
from tests.integration.fleet import Stack


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def sharegpt(folder: Path) -> Path:
    """Two clips, a picture, and a file that is no video."""
    files = {
        "still.mp4": media.clip(),
        "other.mp4": media.clip(8, seed=1),
        "photo.png": media.picture(112, 112),
        "noise.mp4": bytes(range(256)) * 40,
    }
    entries = []
    for name, file in files.items():
        (folder / name).write_bytes(file)
        field = "image" if name.endswith(".png") else "video"
        turns = [{"from": "human", "value": f"<{field}>\nWhat moves?"}, {"from": "gpt", "value": "Nothing."}]
        entries.append({"conversations": turns, field: name})
    path = folder / "sharegpt.json"
    path.write_text(json.dumps(entries))
    return path


def test_every_rate_is_measured_alone_and_only_a_file_that_is_no_video_fails(stack: Stack, tmp_path: Path) -> None:
    asked = ["--server", stack.address, "--workload", str(sharegpt(tmp_path)), "--ignore-eos"]
    load = ["--clients", "4", "--requests", "8", "--warmup", "2", "--max-new-tokens", "4"]
    told = run("bench", *asked, *load, "--pruning-rate", "0", "--pruning-rate", "0.5", "--json")
    plain, pruned = json.loads(told)["by_pruning"]
    for each in (plain, pruned):
        assert (each["asked"], each["answered"], each["failed"]) == (8, 6, 2)
        assert each["completion_tokens"] == 6 * 4
        (error,) = each["failures"]
        assert (error["status"], error["reason"], error["count"]) == ("INVALID_ARGUMENT", "MEDIA_REJECTED", 2)
        assert sum(each["stages_s"].values()) > 0
        assert 0 < each["first_token_s"]["p50"] <= each["total_s"]["p50"] < each["wall_s"]
    assert plain["retained"] == 1
    assert plain["prompt_tokens_full"] == pruned["prompt_tokens_full"] > pruned["prompt_tokens"]


def test_the_cost_of_a_load_is_read_from_the_services_metrics(stack: Stack) -> None:
    metrics = [word for port in stack.metrics_ports.values() for word in ("--metrics", f"127.0.0.1:{port}")]
    load = ["--clients", "2", "--requests", "4", "--warmup", "1", "--max-new-tokens", "8", "--ignore-eos"]
    (measured,) = json.loads(run("bench", "--server", stack.address, *metrics, *load, "--json"))["by_pruning"]
    services = {each["service"]: each for each in measured["services"]}
    for name, stage in (("preprocessing", "decode"), ("encoder", "encode"), ("generation", "step")):
        # No stage is busy for longer than the run, and none is idle: no clip is cached.
        assert 0 < services[name]["busy_s"][stage] <= measured["wall_s"] * max(1, services[name]["workers"])
        assert services[name]["processor_s"] > 0
    # Generation receives clips, and embeddings from the encoder.
    assert services["generation"]["received_bytes"] > 4 * 1000
    assert services["encoder"]["sent_bytes"] > services["generation"]["sent_bytes"] > 0
    # The number of tokens times how long each is held: at most all of the time that a request runs.
    tokens = (measured["prompt_tokens"] + measured["completion_tokens"]) / 4
    assert 0 < measured["kv_token_s"] < measured["held_s"] * tokens
