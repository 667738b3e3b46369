"""Every service refuses oversized prompts and malformed messages by name, before it calls a peer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from gridsieve.common.channels import open_channel, upstream_errors
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract import errors
from gridsieve.common.contract.limits import MAX_INLINE_BYTES
from gridsieve.common.contract.requests import MAX_PARTS, MAX_TEXT_BYTES
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.services.preprocessing.fetch.fetcher import Fetcher
from gridsieve.services.preprocessing.fetch.policy import FetchPolicy
from gridsieve.services.preprocessing.planner import Planner
from gridsieve.services.preprocessing.rpc.planning_threads import PlanningThreads
from gridsieve.services.preprocessing.rpc.servicer import PreprocessingServicer
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from gridsieve.services.preprocessing.workers.limits import Limits
from gridsieve.services.preprocessing.workers.stream_room import StreamRoom
from gridsieve.services.preprocessing.workers.streams import StreamWorkers
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.encoder_pb2 import EncodePrompt, EncodeRequest
from gridsieve.v1.generation_pb2 import GenerateRequest, Sampling
from gridsieve.v1.preprocessing_pb2 import PreprocessRequest
from gridsieve.v1.prompt_pb2 import Media, Message, Part, Prompt
from tests.common.loopback import TIMEOUT_S, serving
from tests.encoder.encoder_service import running
from tests.generation.generation_service import service_of

PATHS = {
    "preprocessing": "/gridsieve.v1.PreprocessingService/Preprocess",
    "encoder": "/gridsieve.v1.EncoderService/Encode",
    "generation": "/gridsieve.v1.GenerationService/Generate",
}
LIMITS = Limits(stall_s=1, frame_s=1, memory_bytes=2**26, file_bytes=1, frames=1, length_s=1)


@asynccontextmanager
async def started(service: str, folder: Path, checkpoint: Path, tower: Tower) -> AsyncIterator[tuple[str, Any]]:
    """A service's address, and a function that counts its calls to peers."""
    if service == "preprocessing":  # it gets only text, so its queues are never started
        reading, decoding = (JobQueue(1, LIMITS, 1, print) for _ in range(2))
        async with PlanningThreads(1) as quick, PlanningThreads(1) as slow:
            planner, streams = Planner(Checkpoint(checkpoint), None), StreamWorkers(StreamRoom(1), LIMITS, print)
            servicer = PreprocessingServicer(planner, Fetcher(FetchPolicy()), quick, slow, reading, decoding, streams)
            async with serving(f"unix:{folder}/p", servicer):
                yield f"unix:{folder}/p", lambda: 0
    elif service == "encoder":
        async with running(folder, tower) as stack:
            yield f"unix:{folder}/e", lambda: len(stack.preprocessing.prompts)
    else:
        async with service_of(folder, checkpoint) as made:
            yield f"unix:{folder}/generation", lambda: made.preprocessing.calls + len(made.encoder.metadata)


def asking(service: str, prompt: Prompt) -> bytes:
    """The first request of a call to the service."""
    if service == "preprocessing":
        return PreprocessRequest(prompt=prompt).SerializeToString()
    if service == "encoder":
        return EncodeRequest(prompt=EncodePrompt(prompt=prompt)).SerializeToString()
    return GenerateRequest(prompt=prompt, sampling=Sampling(max_new_tokens=1)).SerializeToString()


async def answers(channel: grpc.aio.Channel, service: str, *requests: bytes) -> int:
    """How many answers come. Raises the error that the service refuses the requests with."""
    call = channel.stream_stream(PATHS[service])(iter(requests), timeout=TIMEOUT_S)
    with upstream_errors(service):
        return len([answer async for answer in call])


def prompt_of(*parts: Part) -> Prompt:
    return Prompt(messages=[Message(role=prompt_pb2.ROLE_USER, parts=parts)])


HALF = Part(image=Media(data=bytes(MAX_INLINE_BYTES // 2 + 1)))
TOO_MUCH = {
    f"{MAX_PARTS + 1} messages and parts, at most {MAX_PARTS}": Prompt(
        messages=[*[Message(parts=[Part(text="")])] * (MAX_PARTS // 2), Message()]
    ),
    f"{10**5} messages and parts, at most {MAX_PARTS}": Prompt(messages=[Message()] * 10**5),
    "513 media, at most 512": prompt_of(*[Part(image=Media(path="x"))] * 513),
    f"{MAX_TEXT_BYTES + 1} bytes of text": prompt_of(Part(text="é" * (MAX_TEXT_BYTES // 2)), Part(text="x")),
    f"{MAX_INLINE_BYTES + 2} bytes of inline media": prompt_of(HALF, HALF),
}


@pytest.mark.parametrize("service", PATHS)
async def test_oversized_and_malformed_requests_are_refused_before_a_peer_is_called(
    service: str, tmp_path: Path, tiny_checkpoint: Path, tower: Tower
) -> None:
    async with (
        started(service, tmp_path, tiny_checkpoint, tower) as (address, peers_asked),
        open_channel(address) as channel,
    ):
        for complaint, prompt in TOO_MUCH.items():
            with pytest.raises(errors.InvalidRequest, match=f"^prompt.messages hold {complaint}"):
                await answers(channel, service, asking(service, prompt))
        question = asking(service, prompt_of(Part(text="What moves?")))
        for request in (b"\xff" * 40, b"\x0a\x7fabc", question.replace(b"moves", b"\xff\xfeves")):
            with pytest.raises(errors.InvalidRequest, match=rf"^a request of {len(request)} bytes cannot be parsed"):
                await answers(channel, service, request)
        if service == "preprocessing":
            with pytest.raises(errors.InvalidRequest, match="bytes cannot be parsed as a message"):
                await answers(channel, service, question, b"\xff")
        if service == "generation":  # a question is one message, so no file can follow it
            frames = Media(frames={"sizes_bytes": [9], "timestamps_s": [0]})
            for announced, field in (
                (Part(image=Media(data_bytes=9)), "data_bytes"),
                (Part(video=frames), "sizes_bytes"),
            ):
                with pytest.raises(errors.InvalidRequest, match=rf"{field} announces"):
                    await answers(channel, service, asking(service, prompt_of(announced)))
        assert peers_asked() == 0
        assert await answers(channel, service, question) >= 1
