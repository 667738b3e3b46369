"""`python -m benchmarks.peers --offline`: `gridsieve batch` against vLLM's offline `LLM.chat`, over the same folder.

Both have loaded the model, and are given a folder of clips: the services by their paths, through the gateway. In turns,
each round with other bytes. Neither keeps what it computed of a clip. vLLM stands still outside its turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.clips import another_path
from benchmarks.peers.vllm import PLUGIN, variables
from gridsieve.bench.metrics import Spent, read_metrics, spent
from gridsieve.cli.launcher import GATEWAY, SERVICES, LocalStack
from gridsieve.common.contract.retention import EVS, PIXEL_CHANGE

REQUESTS, ANSWERS = "requests.jsonl", "answers.jsonl"


@dataclass(frozen=True, slots=True)
class Job:
    """One contender's median over the rounds. busiest: the stage that was busy for the largest share of the time, and
    this share; cores: the share of the machine's processors that the services used (workers of preprocessing counted by
    their decoding); None of vLLM."""

    contender: str
    dtype: str
    rate: float
    clips_per_s: float
    prompt_tokens: int
    busiest: tuple[str, float] | None = None
    cores: float | None = None


def measure(
    model: Path,
    python: Path,
    clip: bytes,
    dtype: str,
    rate: float,
    clips: int,
    rounds: int,
    question: str,
    tokens: int,
    log: Path,
) -> list[Job]:
    """The contenders over `clips` clips, in `rounds` rounds after one that is not counted. log: of vLLM."""
    methods = (EVS, PIXEL_CHANGE) if rate else (EVS,)
    flags = {"encoder": ["--dtype", dtype, "--cache-bytes", "0"], "generation": ["--dtype", dtype]}
    found: dict[str, list[Job]] = {}
    with tempfile.TemporaryDirectory(prefix="gridsieve-offline-") as name:
        root = Path(name)
        with (
            LocalStack(model, services=(*SERVICES, GATEWAY), media_root=root, flags=flags) as stack,
            _vllm(python, model, dtype, rate, root, question, tokens, log) as vllm,
        ):
            for number in range(rounds + 1):
                for method in methods:
                    folder = _folder(root, clip, clips)
                    job = _ours(stack, folder, dtype, rate, method, question, tokens)
                    found.setdefault(job.contender, []).extend([job] if number else [])
                folder = _folder(root, clip, clips)
                told = _asked(vllm, folder)
                theirs = Job("vLLM, LLM.chat", dtype, rate, clips / told["seconds"], told["prompt_tokens"] // clips)
                found.setdefault(theirs.contender, []).extend([theirs] if number else [])
                print(f"{dtype} {rate:g}: round {number}", file=sys.stderr)
    return [_median(jobs) for jobs in found.values()]


def table(jobs: Sequence[Job]) -> list[str]:
    """Markdown."""
    lines = [
        "| dtype | rate | contender | clips/s | × vLLM | prompt tokens | busiest stage | processors |",
        "|---|---|---|---|---|---|---|---|",
    ]
    theirs = {(each.dtype, each.rate): each.clips_per_s for each in jobs if each.contender.startswith("vLLM")}
    for each in jobs:
        stage = f"{each.busiest[0]} {each.busiest[1]:.0%}" if each.busiest else ""
        cores = "" if each.cores is None else f"{each.cores:.0%}"
        cells = (
            *(each.dtype, f"{each.rate:g}", each.contender, f"{each.clips_per_s:.2f}"),
            *(f"{each.clips_per_s / theirs[each.dtype, each.rate]:.2f}", str(each.prompt_tokens), stage, cores),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _folder(root: Path, clip: bytes, clips: int) -> Path:
    folder = Path(tempfile.mkdtemp(dir=root))
    for _ in range(clips):
        another_path(folder, clip)
    return folder


def _ours(stack: LocalStack, folder: Path, dtype: str, rate: float, method: str, question: str, tokens: int) -> Job:
    lines = []
    for path in sorted(folder.glob("*.mp4")):
        content = [{"type": "video_url", "video_url": {"url": path.as_uri()}}, {"type": "text", "text": question}]
        body = {
            "messages": [{"role": "user", "content": content}],
            "pruning": {"rate": rate, "method": method},
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        lines.append({"custom_id": path.name, "method": "POST", "url": "/v1/chat/completions", "body": body})
    (folder / REQUESTS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    metrics = [f"127.0.0.1:{port}" for port in stack.metrics_ports.values()]
    before = asyncio.run(read_metrics(metrics))
    command = [sys.executable, "-m", "gridsieve", "batch", str(folder / REQUESTS), "-o", str(folder / ANSWERS)]
    done = subprocess.run([*command, "--gateway", stack.url, "--json"], check=True, stdout=subprocess.PIPE)
    told = json.loads(done.stdout)
    services = spent(before, asyncio.run(read_metrics(metrics)))
    shares = dict(_shares(services, told["seconds"]))
    stage = max(shares, key=shares.__getitem__)
    decoding_s = sum(each.busy_s.get("decode", 0.0) for each in services)
    processors_s = decoding_s + sum(each.processor_s for each in services)
    return Job(
        f"gridsieve batch, {method}",
        dtype,
        rate,
        len(lines) / told["seconds"],
        told["prompt_tokens"] // len(lines),
        (stage, shares[stage]),
        processors_s / told["seconds"] / len(os.sched_getaffinity(0)),
    )


def _shares(services: Sequence[Spent], seconds: float) -> Iterator[tuple[str, float]]:
    """For each stage, the share of the time that it was busy."""
    for service in services:
        for stage, busy_s in service.busy_s.items():
            yield stage, busy_s / seconds / (service.workers if stage == "decode" else 1)


@contextmanager
def _vllm(
    python: Path, model: Path, dtype: str, rate: float, root: Path, question: str, tokens: int, log: Path
) -> Iterator[subprocess.Popen[str]]:
    command = [
        str(python),
        str(PLUGIN / "offline.py"),
        str(model),
        dtype,
        f"{rate:g}",
        str(root),
        question,
        str(tokens),
    ]
    pipe = subprocess.PIPE
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=file, env=variables(python), text=True, start_new_session=True
        ) as process,
    ):
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _asked(vllm: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    """What vLLM tells of a folder. Its processes run for as long."""
    assert vllm.stdin is not None
    assert vllm.stdout is not None
    os.killpg(vllm.pid, signal.SIGCONT)
    vllm.stdin.write(f"{folder}\n")
    vllm.stdin.flush()
    for line in vllm.stdout:
        kind, _, told = line.partition(" ")
        if kind == "measured":
            os.killpg(vllm.pid, signal.SIGSTOP)
            return dict(json.loads(told))
    raise RuntimeError("vLLM ended: see its log in --folder")


def _median(jobs: Sequence[Job]) -> Job:
    """The job of the median rate."""
    middle = statistics.median_low(each.clips_per_s for each in jobs)
    return next(each for each in jobs if each.clips_per_s == middle)
