"""`framesieve bench` against three real processes: real clips, a line that is refused, a report and its picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from framesieve.cli.launcher import LocalStack
from tests import media

COMMAND = [sys.executable, "-c", "from framesieve.__main__ import app; app()", "bench"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=150)


def test_a_mix_is_measured_and_what_is_no_video_is_refused_alone(stack: LocalStack, tmp_path: Path) -> None:
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
    picture = tmp_path / "load.png"
    rates = ["--pruning-rate", "0", "--pruning-rate", "0.5"]
    load = ["--clients", "4", "--requests", "16", "--warmup", "2", "--max-new-tokens", "4"]
    asked = ["--server", stack.address, "--workload", str(workload), *rates, *load]
    done = bench(*asked, "--plot", str(picture), "--json", "--records")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    everything, (plain, pruned) = told["all"], told["by_pruning"]
    assert (everything["asked"], everything["answered"], everything["failed"]) == (16, 12, 4)
    (error,) = told["errors"]
    assert (error["status"], error["reason"], error["count"]) == ("INVALID_ARGUMENT", "MEDIA_REJECTED", 4)
    assert (plain["pruning_rate"], plain["answered"], plain["retained"]) == (0, 6, 1)
    assert (pruned["pruning_rate"], pruned["answered"]) == (0.5, 6)
    assert plain["prompt_tokens_full"] == pruned["prompt_tokens_full"] > pruned["prompt_tokens"]
    for record in told["records"]:
        if record["error"] is None:
            assert 1 <= record["completion_tokens"] <= 4
            assert len(record["token_gaps_s"]) == record["completion_tokens"] - 1
            # The client's clock holds the server's, and the way there and back.
            stages_s = record["timings"]
            assert stages_s["time_to_first_token_s"] <= record["first_token_s"] <= record["total_s"]
            assert record["total_s"] <= told["wall_s"]
    assert everything["first_token_s"]["p50"] <= everything["total_s"]["p50"] <= everything["total_s"]["max"]
    with Image.open(picture) as drawn:
        assert drawn.format == "PNG"
        drawn.load()


def test_poisson_arrivals_of_synthesised_clips_are_answered(stack: LocalStack) -> None:
    done = bench("--server", stack.address, "--rate", "10", "--requests", "8", "--max-new-tokens", "2", "--warmup", "0")
    assert done.returncode == 0, done.stderr
    assert "8 answered, 0 failed" in done.stdout
    assert "10 Poisson arrivals a second" in done.stdout


def test_it_starts_what_it_asks() -> None:
    done = bench("--start", "--requests", "4", "--warmup", "0")
    assert done.returncode == 0, done.stderr
    assert "three services started for this run, the embedded model" in done.stdout
    assert "4 answered, 0 failed" in done.stdout
