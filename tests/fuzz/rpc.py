"""`make fuzz-rpc`: mutated calls of Preprocess, Watch, Encode, Generate, Live, Embed and Score, and valid ones behind
faulty peers, against real processes: first with a model that generates, then with an embedder, then with a reranker.

A call passes if it ends in time with a status that blames the right side and reveals no internals. Afterwards the
processes must serve, hold nothing for ended calls, and have grown by no more than the limit below.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from gridsieve.common.channels import REQUEST_ID_KEY, error_from_status
from gridsieve.common.checkpoint import Task
from tests.fuzz.rpc_cases import READERS, Case, case
from tests.fuzz.rpc_stack import MODELS, PATHS, FuzzedStack, fuzzed_stack

CALL_LIMIT_S = 30
IDLE_LIMIT_S = 10
# Services keep freed memory, so one large prompt adds some. A leak of 26 KiB a call exceeds this in ten thousand calls.
GROWTH_BYTES = 192 * 2**20
_AT_ONCE = 12
_BATCH = 250
_INSIDE = re.compile(r"0x[0-9a-f]{6,}|/work\b|/home\b|site-packages|<\S.* object at|Traceback|\.py\b")


@dataclass
class Report:
    ends: Counter[str] = field(default_factory=Counter)  # calls by how they ended
    faults: list[str] = field(default_factory=list)  # with the command that repeats the call


async def fuzz(seed: int, numbers: Iterable[int], progress: bool = False) -> Report:
    """Runs the cases with these numbers."""
    report, cases = Report(), [case(seed, number) for number in numbers]
    for task in MODELS:
        if of_task := [each for each in cases if each.task == task]:
            await _fuzz_model(task, seed, of_task, report, progress)
    return report


async def _fuzz_model(task: Task, seed: int, cases: Sequence[Case], report: Report, progress: bool) -> None:
    """Runs the cases, all of this task, against services with a model of it."""
    async with fuzzed_stack(task) as stack:
        await _warm_up(stack, task, seed)
        idle, settled = stack.held(), stack.resident_bytes()
        for start in range(0, len(cases), _BATCH):
            batch = cases[start : start + _BATCH]
            await _run(stack, batch, report)
            if unwell := stack.unwell():
                report.faults.append(f"after cases {batch[0].number} to {batch[-1].number} of seed {seed}, {unwell}")
                return
            if start < len(cases) // 4:
                settled = stack.resident_bytes()
            if progress:
                print(f"{task}: {start + len(batch)} of {len(cases)}, {len(report.faults)} faults", flush=True)
        report.faults += await _leaks(stack, idle)
        grown = stack.resident_bytes()
        report.faults += [
            f"{name} grew from {before / 2**20:.0f} to {grown[name] / 2**20:.0f} MiB"
            for name, before in settled.items()
            if grown[name] - before > GROWTH_BYTES
        ]
        report.faults += stack.bugs()


async def _warm_up(stack: FuzzedStack, task: Task, seed: int) -> None:
    """Valid calls to every service, which fill caches and allocate what services keep."""
    valid = (case(seed, number) for number in range(-1, -10_000, -1))
    whole = (each for each in valid if each.kind == "whole" and each.task == task)
    report = Report()
    await _run(stack, [next(whole) for _ in range(12)], report)
    assert not report.faults, report.faults


async def _run(stack: FuzzedStack, cases: Sequence[Case], report: Report) -> None:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(_AT_ONCE) as callers:

        async def one(each: Case) -> None:
            code, reason, message, seconds = await loop.run_in_executor(callers, _ended, stack, each)
            fault = each.fault_of(code, reason)
            if code is grpc.StatusCode.DEADLINE_EXCEEDED and each.timeout_s is None:
                fault = f"it had not ended after {seconds:.0f} s"
            if _INSIDE.search(message) or any(path in message for path in stack.hidden):
                fault = "its message reveals internals"
            report.ends[f"{each.service} {each.kind}: {code.name}"] += 1
            if fault:
                report.faults.append(
                    f"{fault}: {each.kind} of {each.service}, bent {each.bent}; it said {message[:300]!r}; "
                    f"again: python -m tests.fuzz.rpc --seed {each.seed} --only {each.number}"
                )

        await asyncio.gather(*(one(each) for each in cases))


def _ended(stack: FuzzedStack, each: Case) -> tuple[grpc.StatusCode, str, str, float]:
    """Status, reason, message and seconds of one call. Blocking gRPC: grpc.aio loses the status while it writes."""
    start = time.monotonic()
    channel, path = stack.channels[each.service], PATHS[each.service]
    options: Any = {"timeout": each.timeout_s or CALL_LIMIT_S, "metadata": ((REQUEST_ID_KEY, each.request_id),)}
    if each.service in READERS:
        call: Any = channel.unary_unary(path).future(each.requests[0], **options)  # type: ignore[arg-type]
    elif each.service == "generation":
        call = channel.unary_stream(path)(each.requests[0], **options)  # type: ignore[arg-type]
    else:
        call = channel.stream_stream(path)(iter(each.requests), **options)  # type: ignore[arg-type]
    with suppress(grpc.RpcError):  # read from the call below, which waits for a call without a stream
        for read, _ in enumerate(() if each.service in READERS else call):
            if read == each.leave_after:
                call.cancel()
    reason = ""
    if call.code() is not grpc.StatusCode.OK:
        reason = error_from_status(cast(grpc.aio.AioRpcError, call), each.service).reason
    return call.code(), reason, call.details() or "", time.monotonic() - start


async def _leaks(stack: FuzzedStack, idle: dict[str, float]) -> list[str]:
    """Gauges that do not return to their values before the calls."""
    deadline = time.monotonic() + IDLE_LIMIT_S
    while leaks := [f"{name} is {held}" for name, held in stack.held().items() if held != idle.get(name, 0)]:
        if time.monotonic() > deadline:
            return leaks
        await asyncio.sleep(0.1)
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat only the case with this number")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    numbers = range(args.cases) if args.only is None else [args.only]
    start = time.monotonic()
    report = asyncio.run(fuzz(args.seed, numbers, progress=True))
    for end, count in sorted(report.ends.items()):
        print(f"{count:6} {end}")
    print(f"{report.ends.total()} calls in {time.monotonic() - start:.0f} s, {len(report.faults)} faults")
    print("\n".join(report.faults[:50]))
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()
