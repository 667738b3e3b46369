"""`make bench-ceiling`: what the path around the model allows, measured with a model that takes no time.

    engine     one step of rows that decode, as on a card: scheduling, packing, the graph's inputs, sampling, events
    grpc       tokens a second of all streams together, against a bare gRPC server that writes a ready message per token
    http       the same by the gateway

The client, generation and the gateway share the machine's cores.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import httpx
import numpy as np
import torch
from torch import Tensor

from benchmarks.ceiling.service import TEXT, TOKEN, constant_logits
from benchmarks.report import Measurement, run
from benchmarks.table import Row, Timings
from gridsieve.common.channels import open_channel
from gridsieve.common.checkpoint import DEMO_MODEL, Checkpoint
from gridsieve.common.contract.plan import PromptPlan
from gridsieve.common.process import free_port
from gridsieve.common.security.credentials import NO_CREDENTIALS
from gridsieve.common.serving.probe import is_serving, serves_http
from gridsieve.services.compute.graphs import Captured
from gridsieve.services.generation.engine.engine import Engine
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.memory.blocks import BlockAllocator
from gridsieve.services.generation.model.attention.block_plan import BlockPlan
from gridsieve.services.generation.model.attention.flash_infer import FlashInferCache
from gridsieve.services.generation.model.runner import Runner
from gridsieve.services.generation.request.pruned_prompt import PrunedPrompt
from gridsieve.services.generation.request.request import Event, Request
from gridsieve.services.generation.sampling.sampler import SamplingParams
from gridsieve.v1.generation_pb2 import GenerateRequest, Sampling
from gridsieve.v1.generation_pb2_grpc import GenerationServiceStub
from gridsieve.v1.prompt_pb2 import ROLE_USER, Message, Part, Prompt

STREAMS, TOKENS = (64, 256), 256
CONTEXT_TOKENS, STEPS, BLOCK_TOKENS = 2000, 200, 16
WARM_UP_STEPS = 64  # in which all prompts are computed
STEP_S = 1e-3


class Instant(Runner):
    """A runner whose model takes no time: decode steps fill the inputs of graphs, as on a card, and compute nothing."""

    def __init__(self, blocks: int, rows: int) -> None:
        model = load_language_model(Checkpoint(DEMO_MODEL), torch.float32, torch.device("cpu"))
        super().__init__(model, blocks, BLOCK_TOKENS)
        self._cache = FlashInferCache(self._cache.sizes, model.embed_tokens.weight, _NoKernels())
        self.capture_decoding(rows, BLOCK_TOKENS * blocks // rows, _nothing)

    _forward = constant_logits


class _NoKernels:
    def prefill(self) -> _NoKernels:
        return self

    def decode(self, rows: int, max_blocks: int) -> _NoKernels:
        return self

    def plan(self, blocks: BlockPlan) -> None:
        pass

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.zeros_like(query)


def _nothing(inputs: Sequence[Tensor], compute: Callable[[], Tensor]) -> Captured:
    """A captured graph that computes nothing: each row's most likely token is TOKEN."""
    output = torch.zeros_like(compute())
    output[:, TOKEN] = 1
    return Captured(lambda: None, output)


def engine(rounds: int) -> list[Row]:
    """The Python of a step in which all sequences decode."""
    return [_engine(rows, rounds) for rows in STREAMS]


def _engine(rows: int, rounds: int) -> Row:
    tokens = CONTEXT_TOKENS + STEPS * rounds + WARM_UP_STEPS
    blocks = rows * -(-tokens // BLOCK_TOKENS)
    runner = Instant(blocks, rows)
    engine = Engine(runner, BlockAllocator(blocks, BLOCK_TOKENS), 2**15, rows, 0, overlap=True)
    events = list[Event]()
    sampling = SamplingParams(tokens - CONTEXT_TOKENS)
    prompts = [PrunedPrompt(_plan(number), ()) for number in range(rows)]
    requests = [Request(str(number), each, (), sampling, None, events.append) for number, each in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
    for _ in range(WARM_UP_STEPS - 2):
        engine.step()
    assert all(request.output_ids for request in requests), "some still wait for their prompt"
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        taken.append((time.perf_counter() - start) / STEPS)
        events.clear()
    what = f"a step of {rows} sequences of {CONTEXT_TOKENS} tokens, without the model"
    at_most = 1.0 if rows == max(STREAMS) else None
    return Row(what, "the goal", statistics.median(taken), STEP_S, "s", at_most=at_most)


def _plan(number: int) -> PromptPlan:
    ids = np.random.default_rng(number).integers(10, 500, CONTEXT_TOKENS, dtype=np.int32)
    return PromptPlan(ids, np.tile(np.arange(CONTEXT_TOKENS, dtype=np.int32), (3, 1)), (), 0, bytes(32))


def over_grpc(rounds: int) -> list[Row]:
    """Tokens a second of all streams together."""
    return asyncio.run(_over("grpc", rounds))


def over_http(rounds: int) -> list[Row]:
    """The same by the gateway."""
    return asyncio.run(_over("http", rounds))


async def _over(way: str, rounds: int) -> list[Row]:
    taken = Timings()
    with TemporaryDirectory() as folder, _services(Path(folder)) as addresses:
        for _ in range(rounds):
            for streams in STREAMS:
                taken.add(f"ours {streams}", await _rate(way, addresses[way], streams))
                taken.add(f"bare {streams}", await _rate("grpc", addresses["bare"], streams))
    rows = []
    for streams in STREAMS:
        ours, bare = taken.median(f"ours {streams}"), taken.median(f"bare {streams}")
        rows.append(Row(f"tokens a second over {way}, {streams} streams", "a bare gRPC server", ours, bare, "1/s"))
    return rows


async def _rate(way: str, address: str, streams: int) -> float:
    asking = {"grpc": _ask_by_grpc, "http": _ask_by_http}[way]
    async with asyncio.timeout(600), asking(address) as ask:
        await ask()
        start = time.perf_counter()
        tokens = await asyncio.gather(*(ask() for _ in range(streams)))
        assert tokens == [TOKENS] * streams, "an answer is not complete"
        return sum(tokens) / (time.perf_counter() - start)


@asynccontextmanager
async def _ask_by_grpc(address: str) -> AsyncIterator[Callable[[], Coroutine[Any, Any, int]]]:
    request = GenerateRequest(
        prompt=Prompt(messages=[Message(role=ROLE_USER, parts=[Part(text="What moves?")])]),
        sampling=Sampling(max_new_tokens=TOKENS, temperature=0, ignore_eos=True),
    )
    async with open_channel(address) as channel:
        stub = GenerationServiceStub(channel)

        async def ask() -> int:
            return sum([len(each.delta.token_ids) async for each in stub.Generate(request)])

        yield ask


@asynccontextmanager
async def _ask_by_http(address: str) -> AsyncIterator[Callable[[], Coroutine[Any, Any, int]]]:
    messages = [{"role": "user", "content": "What moves?"}]
    options = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps({"messages": messages, **options, "stream_options": {"include_usage": True}})
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=300, limits=limits) as client:

        async def ask() -> int:
            async with client.stream("POST", "/v1/chat/completions", content=body) as answer:
                pieces = [piece async for piece in answer.aiter_raw()]
            lines = b"".join(pieces).split(b"data: ")
            chunks = [json.loads(line) for line in lines if line.startswith(b"{")]
            text = "".join(each["choices"][0]["delta"].get("content", "") for each in chunks if each["choices"])
            assert text == TEXT * TOKENS, "a part of the answer is lost"
            return int(chunks[-1]["usage"]["completion_tokens"])

        yield ask


@contextmanager
def _services(folder: Path) -> Iterator[Mapping[str, str]]:
    """Runs preprocessing, generation without its model, the gateway and the bare server. Yields addresses by way."""
    sockets = {name: f"unix:{folder / name}" for name in ("preprocessing", "encoder", "generation", "bare")}
    http = f"127.0.0.1:{free_port()}"
    upstream = ("--preprocessing", sockets["preprocessing"], "--encoder", sockets["encoder"])
    limits = f"--max-num-seqs {max(STREAMS)} --max-num-batched-tokens 8192 --kv-cache-tokens 131072 --threads 1".split()
    commands = {
        "preprocessing": ("gridsieve.services.preprocessing", "--listen", sockets["preprocessing"]),
        "generation": ("benchmarks.ceiling.service", "--listen", sockets["generation"], *upstream, *limits),
        "gateway": ("gridsieve.services.gateway", "--listen", http, "--generation", sockets["generation"]),
        "bare": ("benchmarks.ceiling.bare", sockets["bare"], str(TOKENS)),
    }
    with ExitStack() as running:
        for name, command in commands.items():
            metrics = ("--metrics-port", "0") if name in ("preprocessing", "generation") else ()
            log = running.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen([sys.executable, "-m", *command, *metrics], stderr=log)
            running.callback(process.wait)
            running.callback(process.terminate)
        for name in ("preprocessing", "generation", "bare"):
            _wait(partial(is_serving, sockets[name], NO_CREDENTIALS, 1), folder / f"{name}.log")
        _wait(partial(serves_http, http, {}, 1), folder / "gateway.log")
        yield {"grpc": sockets["generation"], "http": http, "bare": sockets["bare"]}


def _wait(serves: Callable[[], bool], log: Path) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        with suppress(grpc.RpcError, OSError):
            if serves():
                return
        time.sleep(0.1)
    raise SystemExit(f"a service does not start: {log.read_text()[-2000:]}")


MEASUREMENTS: Mapping[str, Measurement] = {"engine": engine, "grpc": over_grpc, "http": over_http}

if __name__ == "__main__":
    run("ceiling", __doc__, MEASUREMENTS, rounds=5, least_rounds=3)
