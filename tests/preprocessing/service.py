"""A real preprocessing server on a unix socket with its workers, and calls to it."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import numpy as np
import pytest

from gridsieve.common.channels import error_from_status
from gridsieve.common.contract.plan import Modality, PromptPlan
from gridsieve.common.contract.tensors import TensorBuffer
from gridsieve.common.contract.wire import PlanReceiver, Take, add_chunk, buffer_for
from gridsieve.common.security.quotas import ClientQuotas
from gridsieve.common.serving.interceptors import RequestInterceptor
from gridsieve.services.preprocessing.fetch.fetcher import Fetcher
from gridsieve.services.preprocessing.fetch.policy import FetchPolicy
from gridsieve.services.preprocessing.planner import Planner
from gridsieve.services.preprocessing.rpc.metrics import FETCHED_BYTES, watch
from gridsieve.services.preprocessing.rpc.planning_threads import PlanningThreads
from gridsieve.services.preprocessing.rpc.servicer import PreprocessingServicer
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from gridsieve.services.preprocessing.workers.limits import Limits
from gridsieve.services.preprocessing.workers.process import Fault
from gridsieve.services.preprocessing.workers.stream_room import StreamRoom
from gridsieve.services.preprocessing.workers.streams import StreamWorkers
from gridsieve.v1 import preprocessing_pb2_grpc, prompt_pb2
from gridsieve.v1.preprocessing_pb2 import PreprocessRequest
from tests.preprocessing.media_server import Resolver, Server, policy

INFLIGHT_SLICES = 4
SLICE_BYTES = 2 * 1024 * 1024 * 3
EVERYTHING = PreprocessRequest(select=prompt_pb2.Select(all=True))

MAX_INLINE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Queues:
    """Queues of one worker each, two streams, and the faults of replaced workers."""

    reading: JobQueue
    decoding: JobQueue
    streams: StreamWorkers
    replaced: list[Fault]

    @property
    def counters(self) -> tuple[int, int, int]:
        """Reading jobs, decoding jobs, and bytes in flight."""
        return self.reading.jobs, self.decoding.jobs, self.decoding.inflight.held_bytes

    @property
    def idle(self) -> bool:
        return all(len(each.workers._idle) == each.workers.size for each in (self.reading, self.decoding))


@asynccontextmanager
async def running_queues() -> AsyncIterator[Queues]:
    limits = Limits(stall_s=60, frame_s=1, memory_bytes=2**31, file_bytes=2**30, frames=2**20, length_s=10_000)
    replaced: list[Fault] = []
    reading = JobQueue(1, limits, 2**20, replaced.append)
    decoding = JobQueue(1, limits, INFLIGHT_SLICES * SLICE_BYTES, replaced.append)
    async with reading, decoding:
        yield Queues(reading, decoding, StreamWorkers(StreamRoom(2), limits, replaced.append), replaced)


@dataclass(frozen=True, slots=True)
class Service:
    """media_root: of its planner. folder: of its socket and of what it fetches."""

    planner: Planner
    media_root: Path
    folder: Path
    queues: Queues

    @asynccontextmanager
    async def serving(
        self, web: Server | None = None, threads: int = 1, held_bytes: int = 2**28, fetcher: Fetcher | None = None
    ) -> AsyncIterator[Any]:
        """A stub. web: the server may fetch from there, as clip.test. threads: for plans that are not quick."""
        server = grpc.aio.server(
            interceptors=[RequestInterceptor(ClientQuotas(), "test", None)],
            options=[("grpc.max_receive_message_length", 20 * 2**20)],
        )
        with mock.patch.object(tempfile, "tempdir", str(self.folder)):
            if fetcher is None:
                allowed, resolver = policy(web.port) if web else FetchPolicy(), Resolver(clip_test=[["127.0.0.1"]])
                fetcher = Fetcher(allowed, resolver, on_bytes=FETCHED_BYTES.inc)
        async with PlanningThreads(1) as quick, PlanningThreads(threads) as slow:
            watch(self.queues.reading, self.queues.decoding, quick, slow)
            reading, decoding = self.queues.reading, self.queues.decoding
            made = PreprocessingServicer(
                *(self.planner, fetcher, quick, slow, reading, decoding, self.queues.streams, MAX_INLINE_BYTES),
                held_bytes=held_bytes,
            )
            preprocessing_pb2_grpc.add_PreprocessingServiceServicer_to_server(made, server)
            address = f"unix:{self.folder}/socket"
            server.add_insecure_port(address)
            await server.start()
            try:
                async with grpc.aio.insecure_channel(address) as channel:
                    yield preprocessing_pb2_grpc.PreprocessingServiceStub(channel)
            finally:
                await server.stop(1)


def prompt_of(*parts: prompt_pb2.Part) -> PreprocessRequest:
    message = prompt_pb2.Message(role=prompt_pb2.ROLE_USER, parts=parts)
    return PreprocessRequest(prompt=prompt_pb2.Prompt(messages=[message]))


def video(data: bytes | None = None, **fields: Any) -> prompt_pb2.Part:
    """A video by its bytes, or by another field of Media."""
    return prompt_pb2.Part(video=prompt_pb2.Media(data=data, **fields))


def text(words: str) -> prompt_pb2.Part:
    return prompt_pb2.Part(text=words)


def select(index: int) -> PreprocessRequest:
    return PreprocessRequest(select=prompt_pb2.Select(media_index=index))


async def sent(stub: Any, *requests: PreprocessRequest) -> Any:
    """An open call that has sent these requests, those after the prompt and its files once the plan has arrived.

    grpc.aio loses the status of a refusal that arrives while the client writes, hence the wait.
    """
    call = stub.Preprocess()
    planned = False
    for index, request in enumerate(requests):
        if index and not planned and not request.HasField("file"):
            await plan_of(call)
            planned = True
        await call.write(request)
    if not requests:
        await call.done_writing()
    return call


async def asked(stub: Any, *requests: PreprocessRequest) -> Any:
    """A half-closed call that has sent these requests; a single request selects everything."""
    call = stub.Preprocess()
    for request in requests if len(requests) > 1 else (*requests, EVERYTHING):
        await call.write(request)
    await call.done_writing()
    return call


async def plan_of(call: Any) -> PromptPlan:
    receiver = PlanReceiver()
    while True:
        plan = receiver.take_message((await call.read()).plan)
        if plan is not None:
            return plan


async def frames_of(
    call: Any, plan: PromptPlan, take: Take | None = None
) -> tuple[dict[int, np.ndarray[Any, Any]], int]:
    """The frames of each item, the items in the order of arrival, and the number of repaired frames.

    take: of frames in shared memory.
    """
    received: dict[int, list[np.ndarray[Any, Any]]] = {}
    repaired = 0
    buffer: TensorBuffer | None = None
    while (response := await call.read()) is not grpc.aio.EOF:
        chunk = response.frames
        item = plan.media[chunk.media_index]
        held = received.setdefault(chunk.media_index, [])
        count = 1 if item.modality is Modality.IMAGE else 2
        repaired += chunk.repaired_frames
        if chunk.HasField("repeats_frame"):
            held.append(held[chunk.repeats_frame // count])
            continue
        if buffer is None:
            assert chunk.first_frame == count * len(held)
            shape = (count, *item.frames.size_px, 3)
            buffer = buffer_for(chunk.chunk, [item.frames.dtype], shape, take)
        add_chunk(buffer, chunk.chunk)
        if buffer.complete:
            held.append(np.frombuffer(buffer.data, buffer.dtype.label).reshape(buffer.shape))
            buffer = None
    return {index: np.concatenate(held) for index, held in received.items()}, repaired


async def serves(stub: Any, *requests: PreprocessRequest) -> list[int]:
    """The items whose frames it answers these requests with."""
    call = await asked(stub, *requests)
    return list((await frames_of(call, await plan_of(call)))[0])


async def refused(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """Status, reason and message of a refused stream."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error_from_status(error, "").reason, error.details() or ""
    pytest.fail("it was not refused")


@contextmanager
def stopped(queue: JobQueue) -> Iterator[int]:
    """Stops the queue's only worker inside, as if its decoder hung."""
    (worker,) = queue.workers._workers
    os.kill(worker.pid, signal.SIGSTOP)
    yield worker.pid
