"""`make bench-gateway`: what the HTTP gateway costs over gRPC, and its memory.

Both ways ask the same services the same questions in turns, about clips that no cache knows, at rate 0.75.
"""

from __future__ import annotations

import asyncio
import base64
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from benchmarks.ask import ask
from benchmarks.clips import another_file
from benchmarks.models import RANDOM
from benchmarks.processes import resident_bytes
from benchmarks.report import Measurement, run
from benchmarks.table import Row, Timings
from benchmarks.timing import Timed
from demo.example import CLIP, QUESTIONS
from gridsieve.cli.launcher import GATEWAY, SERVICES, LocalStack
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Options, Video
from gridsieve.common.checkpoint import DEMO_MODEL
from gridsieve.common.contract.retention import EVS

RATE, TOKENS, CLIENTS, EACH = 0.75, 64, 8, 3
LARGE_BYTES, LARGE_REQUESTS = 5 * 10**6, 1000
MOST_S, LEAST_RATE = 0.005, 0.95
QUESTION = QUESTIONS[0].text
ALL = (*SERVICES, GATEWAY)


def cost(rounds: int) -> list[Row]:
    """First token and tokens a second, by HTTP against gRPC."""
    with TemporaryDirectory() as folder:
        models = {"demo": DEMO_MODEL, "random": RANDOM.save(RANDOM.drawn(), Path(folder))}
        return [row for name, model in models.items() for row in asyncio.run(_cost(name, model, rounds))]


async def _cost(name: str, folder: Path, rounds: int) -> list[Row]:
    taken = Timings()
    async with LocalStack(folder, services=ALL) as stack, _ways(stack) as ways:
        for ask in ways.values():
            await asyncio.gather(*(ask() for _ in range(CLIENTS)))
        for _ in range(rounds):
            for way, ask in ways.items():
                taken.add(f"first {way}", statistics.median([(await ask()).first_token_s for _ in range(5)]))
            for way, ask in ways.items():
                start = time.perf_counter()
                asked = await asyncio.gather(*(_one_after_another(ask) for _ in range(CLIENTS)))
                taken.add(f"rate {way}", sum(map(sum, asked)) / (time.perf_counter() - start))
    first, theirs = taken.median("first http"), taken.median("first gRPC")
    first_token, rate = (
        f"{name}: first token, one client, by HTTP",
        f"{name}: tokens a second, {CLIENTS} clients, by HTTP",
    )
    note, most = f"{(first - theirs) * 1e3:+.1f} ms", 1 + MOST_S / theirs
    return [
        Row(first_token, "gRPC", first, theirs, "s", at_most=most, note=note),
        Row(rate, "gRPC", taken.median("rate http"), taken.median("rate gRPC"), "1/s", at_least=LEAST_RATE),
    ]


async def _one_after_another(ask: Callable[[], Coroutine[Any, Any, Timed]]) -> list[int]:
    return [(await ask()).tokens for _ in range(EACH)]


def memory(rounds: int) -> list[Row]:
    """Memory of the gateway over a thousand questions with 5 MB of video each."""
    return [asyncio.run(_memory())]


async def _memory() -> Row:
    async with LocalStack(services=ALL) as stack:
        held = []
        async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
            for number in range(LARGE_REQUESTS // CLIENTS):
                clip = another_file(CLIP.read_bytes(), LARGE_BYTES)
                body = json.dumps(_body(clip) | {"max_tokens": 4})
                answers = await asyncio.gather(
                    *(client.post("/v1/chat/completions", content=body) for _ in range(CLIENTS))
                )
                assert all(answer.status_code == 200 for answer in answers), answers[0].text
                if number % 5 == 0:
                    held.append(resident_bytes(stack.processes[GATEWAY].pid))
    quarter = len(held) // 4
    last, second = statistics.median(held[-quarter:]), statistics.median(held[quarter : 2 * quarter])
    what = f"memory of the gateway, the last quarter of {LARGE_REQUESTS} questions with {LARGE_BYTES // 10**6} MB"
    return Row(what, "the second quarter", last, second, "bytes", at_most=1.05)


@asynccontextmanager
async def _ways(stack: LocalStack) -> AsyncIterator[Mapping[str, Callable[[], Coroutine[Any, Any, Timed]]]]:
    """Functions that ask one question each, by HTTP and by gRPC, and read the stream of its answer."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        GridsieveClient(stack.address) as client,
        httpx.AsyncClient(base_url=stack.url, timeout=300, limits=limits) as http,
    ):

        async def by_grpc() -> Timed:
            options: Options = {"pruning_rate": RATE, "max_new_tokens": TOKENS, "ignore_eos": True}
            return (await ask(client, Video(data=another_file(CLIP.read_bytes())), QUESTION, **options))[0]

        async def by_http() -> Timed:
            start, first_s, tokens = time.perf_counter(), 0.0, 0
            body = _body(another_file(CLIP.read_bytes())) | {"stream": True}
            body["stream_options"] = {"include_usage": True}
            async with http.stream("POST", "/v1/chat/completions", content=json.dumps(body)) as answer:
                pieces = []
                async for piece in answer.aiter_raw():
                    first_s = first_s or time.perf_counter() - start
                    pieces.append(piece)
                lines = reversed(b"".join(pieces[-3:]).splitlines())
                usage = next(line for line in lines if b'"usage"' in line)  # the last; others may have null
                tokens = json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
            return Timed(first_s, time.perf_counter() - start, tokens)

        yield {"gRPC": by_grpc, "http": by_http}


def _body(clip: bytes) -> dict[str, Any]:
    url = "data:video/mp4;base64," + base64.b64encode(clip).decode()
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    return {
        "messages": [{"role": "user", "content": content}],
        "pruning": {"rate": RATE, "method": EVS},
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }


MEASUREMENTS: Mapping[str, Measurement] = {"cost": cost, "memory": memory}

if __name__ == "__main__":
    run("gateway", __doc__, MEASUREMENTS, rounds=7, least_rounds=5)
