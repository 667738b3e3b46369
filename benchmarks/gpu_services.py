"""The three services on a device, from the file's bytes to the tokens, at all rates, for one client and many.

Every question is about another file, and the encoder's cache is off, so that no question hits a cache. Clients form a
closed loop: each asks again when it is answered. transformers' `generate` answers one question after another, unpruned.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from statistics import median

from benchmarks import gpu_device
from benchmarks.gpu_generate import Generate
from benchmarks.gpu_run import GENERATE, Run
from benchmarks.media_clips import RATE, another_file, clip
from benchmarks.table import Row
from benchmarks.timing import Summary
from common.contract.retention import Pruning
from framesieve.bench.backend import Backend, GrpcBackend
from framesieve.bench.load import Extent, closed_loop
from framesieve.bench.measure import Record, timed
from framesieve.bench.metrics import Samples, read_metrics
from framesieve.bench.workload import Entry, Workload
from framesieve.cli.launcher import LocalStack
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Options, Text, Video

RATES = (0.0, 0.5, 0.75, 0.9)
HEIGHT_PX, WIDTH_PX, KEYFRAME_EVERY = 360, 640, 60
QUESTION = "What happens in the video?"
NEW_TOKENS = 64
OPTIONS: Options = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0}
REQUESTS_PER_CLIENT, LEAST_REQUESTS = 2, 4
READY_TIMEOUT_S = 600.0  # kernels may be compiled at the first start
STEPS, REPLAYED = "framesieve_generation_step_seconds_count", "framesieve_generation_replayed_steps_total"


def stack(run: Run) -> list[Row]:
    """Time to first token, tokens/s and the share of replayed steps, by pruning rate and number of clients."""
    data = clip(run.target.clip_s * RATE, HEIGHT_PX, WIDTH_PX, KEYFRAME_EVERY)
    generate = Generate(run.folder, run.device, run.dtype)
    theirs = Summary.of([generate.ask(another_file(data), QUESTION, NEW_TOKENS) for _ in range(run.rounds + 1)][1:])
    print("`generate` has answered", file=sys.stderr)
    del generate
    gpu_device.give_back(run.device)
    return asyncio.run(_stack(run, data, theirs))


async def _stack(run: Run, data: bytes, theirs: Summary) -> list[Row]:
    flags = {name: ["--device", str(run.device)] for name in ("encoder", "generation")}
    flags["encoder"] += ["--cache-bytes", "0"]
    rows = []
    services = LocalStack(run.folder, flags=flags, ready_timeout_s=READY_TIMEOUT_S)
    async with services as started, FramesieveClient(started.address) as client:
        backend = GrpcBackend(client)
        metrics = [f"127.0.0.1:{started.metrics_ports['generation']}"]
        await _ask(backend, data, RATES[0], max(run.target.clients), max(run.target.clients))  # a warm-up
        for rate in RATES:
            for clients in run.target.clients:
                before = await read_metrics(metrics)
                requests = max(LEAST_REQUESTS, REQUESTS_PER_CLIENT * clients)
                records, wall_s = await _ask(backend, data, rate, clients, requests)
                after = await read_metrics(metrics)
                steps, replayed = (_sum(after, name) - _sum(before, name) for name in (STEPS, REPLAYED))
                rows += _rows(f"stack, rate {rate:g}, {clients} clients", records, wall_s, theirs)
                rows.append(
                    Row(
                        f"stack, rate {rate:g}, {clients} clients: steps replayed",
                        "all steps",
                        replayed,
                        steps,
                        "steps",
                    )
                )
                print(f"stack: rate {rate:g}, {clients} clients", file=sys.stderr)
    return rows


async def _ask(backend: Backend, data: bytes, rate: float, clients: int, requests: int) -> tuple[list[Record], float]:
    """The records of all requests, and the seconds that they took together."""
    workload = Workload([Entry((Video(data=data), Text(QUESTION)))], unique=True)
    clock = asyncio.get_running_loop().time
    records: list[Record] = []
    began_s = clock()

    async def ask(number: int, due_s: float) -> None:
        question = workload.question(number, Pruning(rate))
        records.append(await timed(backend, number, question, due_s, began_s, OPTIONS))

    await closed_loop(ask, clients, Extent(requests))
    return records, clock() - began_s


def _rows(what: str, records: Sequence[Record], wall_s: float, theirs: Summary) -> list[Row]:
    """Of the answered requests. Raises RuntimeError if none was answered."""
    failures = [record.failure for record in records if record.failure]
    first = [record.first_token_s for record in records if record.first_token_s is not None]
    if not first:
        raise RuntimeError(f"{what}: all {len(records)} requests failed: {failures[0]}")
    usages = [record.usage for record in records if record.usage]
    note = f"{usages[0].prompt_tokens} tokens of prompt; {_stages(records)}"
    if failures:
        note += f"; {len(failures)} of {len(records)} requests failed, {failures[0]}"
    tokens_per_s = sum(usage.completion_tokens for usage in usages) / wall_s
    return [
        Row(f"{what}: first token", GENERATE, median(first), theirs.first_token_s, "s", note=note),
        Row(f"{what}: tokens", GENERATE, tokens_per_s, NEW_TOKENS / theirs.total_s, "tokens/s"),
    ]


def _stages(records: Sequence[Record]) -> str:
    """The median of each stage before the first token."""
    stages = [record.timings.stages_s for record in records if record.timings]
    return ", ".join(f"{name} {median(each[name] for each in stages) * 1e3:.0f} ms" for name in stages[0])


def _sum(samples: Sequence[Samples], name: str) -> float:
    return sum(value for each in samples for (found, _), value in each.items() if found == name)
