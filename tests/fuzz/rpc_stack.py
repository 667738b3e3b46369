"""Three real processes, with proxies in between that mutate answers of calls whose request id asks for it.

caller ──▶ generation ──▶ [bent encoder] ──▶ encoder ──▶ [bent preprocessing] ──▶ preprocessing
                     └──▶ [bent preprocessing]
"""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from demo.checkpoint import TINY, write_checkpoint
from gridsieve.common.channels import MAX_RECEIVE_BYTES, REQUEST_ID_KEY
from gridsieve.common.checkpoint import Task
from gridsieve.common.security.credentials import NO_CREDENTIALS
from gridsieve.common.serving.probe import is_serving
from gridsieve.v1.encoder_pb2 import EncodeResponse
from gridsieve.v1.preprocessing_pb2 import PreprocessResponse, WatchResponse
from tests.common.loopback import speaking
from tests.families import write_qwen3_vl_reader
from tests.fuzz.rpc_cases import EMBED, LIVE, READERS, SCORE, SERVICES, WATCH, clip
from tests.fuzz.rpc_mutations import mutate, mutate_bytes
from tests.integration.fleet import Service, Stack, exported, started

PATHS = {
    "preprocessing": "/gridsieve.v1.PreprocessingService/Preprocess",
    "encoder": "/gridsieve.v1.EncoderService/Encode",
    "generation": "/gridsieve.v1.GenerationService/Generate",
    LIVE: "/gridsieve.v1.GenerationService/Live",
    WATCH: "/gridsieve.v1.PreprocessingService/Watch",
    EMBED: "/gridsieve.v1.GenerationService/Embed",
    SCORE: "/gridsieve.v1.GenerationService/Score",
}
# Writes the model of a task.
MODELS: Mapping[Task, Callable[[Path], Path]] = {
    "generate": partial(write_checkpoint, shape=TINY, seed=1),
    "embed": partial(write_qwen3_vl_reader, seed=1, module="Pooling"),
    "score": partial(write_qwen3_vl_reader, seed=1, module="LogitScore"),
}
# Of each upstream service, what its calls answer.
_ANSWERS: dict[str, dict[str, type[PreprocessResponse | WatchResponse | EncodeResponse]]] = {
    "preprocessing": {"preprocessing": PreprocessResponse, WATCH: WatchResponse},
    "encoder": {"encoder": EncodeResponse},
}
# These gauges grow with what services keep for later requests.
_KEPT = re.compile(r"cache|idle")
_SILENCE_S = 0.3
# Small limits, so that a mutated length cannot make a case slow.
_FLAGS = {
    "preprocessing": ("--fetch-schemes", "", "--decode-workers", "2", "--max-streams", "32"),
    "encoder": ("--cache-bytes", str(2**20), "--output-buffer-bytes", str(2**24), "--threads", "1"),
    "generation": ("--kv-cache-tokens", "5120", "--max-model-len", "512", "--threads", "1"),
}


class FuzzedStack:
    """The services, channels to them that carry raw bytes, and their health, gauges, memory and logs."""

    def __init__(self, stack: Stack, channels: dict[str, grpc.Channel], hidden: Sequence[str]) -> None:
        self.channels = channels
        self.hidden = hidden
        self._stack = stack

    def unwell(self) -> str | None:
        """Describes a service that has ended or does not serve, or None."""
        for name, service in self._stack.services.items():
            if not service.running:
                return f"{name} has ended:\n{service.log()[-4000:]}"
            if not is_serving(service.address, NO_CREDENTIALS, timeout_s=20):
                return f"{name} does not serve"
        return None

    def held(self) -> dict[str, float]:
        """All gauges that must return to their former values once no call runs."""
        found: dict[str, float] = {}
        for name, port in self._stack.metrics_ports.items():
            text = exported(port)
            gauges = set(re.findall(r"^# TYPE (gridsieve_\w+) gauge$", text, re.MULTILINE))
            for sample, labels, value in re.findall(r"^(\w+)(\{.*\})? (\S+)$", text, re.MULTILINE):
                if sample in gauges and not _KEPT.search(sample):
                    found[f"{name}: {sample}{labels}"] = float(value)
        return found

    def resident_bytes(self) -> dict[str, float]:
        """The resident memory of each service."""
        services = self._stack.services.items()
        return {name: each.metric("process_resident_memory_bytes") for name, each in services}

    def bugs(self) -> list[str]:
        """Log lines of the services about bugs of their own."""
        lines = ((name, line) for name in SERVICES for line in self._stack.log(name).splitlines())
        return [f"{name}: {line}" for name, line in lines if '"event": "bug"' in line]


@asynccontextmanager
async def fuzzed_stack(task: Task) -> AsyncIterator[FuzzedStack]:
    """The stack with a model of this task."""
    async with AsyncExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-")))
        checkpoint = MODELS[task](folder / "model")
        (folder / "media").mkdir()
        (folder / "media" / "clip.mp4").write_bytes(clip())
        addresses = {name: f"unix:{folder}/{name}" for name in SERVICES}
        bent = {name: f"unix:{folder}/bent-{name}" for name in _ANSWERS}
        flags = {
            "preprocessing": (*_FLAGS["preprocessing"], "--media-root", str(folder / "media")),
            "encoder": (*_FLAGS["encoder"], "--preprocessing", bent["preprocessing"]),
            "generation": (
                *(*_FLAGS["generation"], "--preprocessing", bent["preprocessing"], "--encoder", bent["encoder"]),
                *(("--live-tokens", "4096") if task == "generate" else ()),
            ),
        }
        for name, address in bent.items():
            await opened.enter_async_context(_bending(name, address, addresses[name]))
        stack = Stack({name: Service(name, checkpoint, folder, flags[name], addresses[name]) for name in SERVICES})
        opened.enter_context(started(*stack.services.values()))
        channels = {name: opened.enter_context(grpc.insecure_channel(each)) for name, each in addresses.items()}
        channels |= dict.fromkeys((LIVE, *READERS), channels["generation"]) | {WATCH: channels["preprocessing"]}
        hidden = (str(folder), str(Path(__file__).parent.parent.parent))
        yield FuzzedStack(stack, channels, hidden)


@asynccontextmanager
async def _bending(name: str, address: str, upstream: str) -> AsyncIterator[None]:
    """Forwards calls and mutates the answers to those whose request id names this service."""
    options = [("grpc.max_receive_message_length", MAX_RECEIVE_BYTES)]
    async with grpc.aio.insecure_channel(upstream, options=options) as channel:

        async def behaviour(called: str, requests: Any, context: Any) -> AsyncIterator[bytes]:
            request_id = str(dict(context.invocation_metadata())[REQUEST_ID_KEY])
            call: Any = channel.stream_stream(PATHS[called])(
                timeout=context.time_remaining(), metadata=((REQUEST_ID_KEY, request_id),)
            )
            passing = asyncio.create_task(_pass_on(requests, call))
            try:
                bends = request_id.startswith(f"fuzz-{name}-")
                async for answer in _bent(call, _ANSWERS[name][called], random.Random(request_id)) if bends else call:
                    yield answer
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata()))
            finally:
                passing.cancel()
                call.cancel()

        behaviours = {PATHS[called]: partial(behaviour, called) for called in _ANSWERS[name]}
        async with speaking(address, behaviours, options):
            yield


async def _pass_on(requests: AsyncIterator[bytes], call: Any) -> None:
    """Writes like `gridsieve.common.channels.write_to`, which keeps the status of a call that ends meanwhile."""
    with suppress(grpc.aio.AioRpcError, grpc.aio.InternalError):
        await call.wait_for_connection()
        async for request in requests:
            await call._cython_call.send_serialized_message(request)
        await call.done_writing()


async def _bent(answers: AsyncIterator[bytes], kind: type[Message], random_: random.Random) -> AsyncIterator[bytes]:
    """The answers, messages of that kind, one of them mutated."""
    target = random_.choice((0, 0, 1, 2, 3, random_.randrange(20)))
    how = random_.choice(("structure",) * 6 + ("bytes", "drop", "double", "late", "repeat", "end"))
    late: list[bytes] = []
    each = aiter(answers)
    for place in count():
        try:
            # After a mutated answer the caller may ask for nothing more: stop waiting for further answers.
            answer = await asyncio.wait_for(anext(each), _SILENCE_S if place > target else None)
        except (TimeoutError, StopAsyncIteration):
            return
        if place == target:
            match how:
                case "structure":
                    message = kind.FromString(answer)
                    mutate(message, random_)
                    yield message.SerializeToString()
                case "bytes":
                    yield mutate_bytes(answer, random_)
                case "double" | "repeat":
                    for _ in range(2 if how == "double" else 200):
                        yield answer
                case "late":
                    late.append(answer)
                case "end":
                    return
        else:
            yield answer
            while late:
                yield late.pop()
