"""Every service refuses oversized prompts and malformed messages by name, before it calls a peer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.channels import error_from_status, open_channel
from common.checkpoint import Checkpoint
from common.contract import errors
from common.contract.requests import MAX_INLINE_BYTES, MAX_PARTS, MAX_TEXT_BYTES
from framesieve.v1 import prompt_pb2
from framesieve.v1.encoder_pb2 import EncodePrompt, EncodeRequest
from framesieve.v1.generation_pb2 import GenerateRequest, Sampling
from framesieve.v1.preprocessing_pb2 import PreprocessRequest
from services.encoder.tower.tower import Tower
from services.preprocessing.fetch.fetcher import Fetcher
from services.preprocessing.fetch.policy import FetchPolicy
from services.preprocessing.planner import Planner
from services.preprocessing.rpc.planning_threads import PlanningThreads
from services.preprocessing.rpc.servicer import PreprocessingServicer
from services.preprocessing.workers.job_queue import JobQueue
from services.preprocessing.workers.limits import Limits
from tests.common.loopback import TIMEOUT_S, serving
from tests.encoder.encoder_service import running, tower_of
from tests.generation.generation_service import service_of

PATHS = {
    "preprocessing": "/framesieve.v1.PreprocessingService/Preprocess",
    "encoder": "/framesieve.v1.EncoderService/Encode",
    "generation": "/framesieve.v1.GenerationService/Generate",
}
LIMITS = Limits(wall_s=1, memory_bytes=2**26, file_bytes=1, frames=1, length_s=1, pixels=1)


@pytest.fixture(scope="module")
def tower(tiny_checkpoint: Path) -> Tower:
    return tower_of(tiny_checkpoint)


@asynccontextmanager
async def preprocessing(folder: Path, checkpoint: Path) -> AsyncIterator[str]:
    """The address of a service that gets only text, so its queues are never started."""
    reading, decoding = (JobQueue(1, LIMITS, 1, print) for _ in range(2))
    async with PlanningThreads(1) as quick, PlanningThreads(1) as slow:
        planner = Planner(Checkpoint(checkpoint), None)
        servicer = PreprocessingServicer(planner, Fetcher(FetchPolicy()), quick, slow, reading, decoding)
        async with serving(f"unix:{folder}/p", servicer):
            yield f"unix:{folder}/p"


@asynccontextmanager
async def started(service: str, folder: Path, checkpoint: Path, tower: Tower) -> AsyncIterator[tuple[str, Any]]:
    """A service's address, and a function that counts its calls to peers."""
    if service == "preprocessing":
        async with preprocessing(folder, checkpoint) as address:
            yield address, lambda: 0
    elif service == "encoder":
        async with running(folder, tower) as stack:
            yield f"unix:{folder}/e", lambda: len(stack.preprocessing.prompts)
    else:
        async with service_of(folder, checkpoint) as made:
            yield f"unix:{folder}/generation", lambda: made.preprocessing.calls + len(made.encoder.metadata)


def asking(service: str, prompt: prompt_pb2.Prompt) -> bytes:
    """The first request of a call to the service."""
    if service == "preprocessing":
        return PreprocessRequest(prompt=prompt).SerializeToString()
    if service == "encoder":
        return EncodeRequest(prompt=EncodePrompt(prompt=prompt)).SerializeToString()
    return GenerateRequest(prompt=prompt, sampling=Sampling(max_new_tokens=1)).SerializeToString()


async def answers(channel: grpc.aio.Channel, service: str, request: bytes) -> int:
    """How many answers come to a request. Raises the leaf that the service refuses it with."""
    call = channel.stream_stream(PATHS[service])(iter([request]), timeout=TIMEOUT_S)
    if service == "generation":
        call = channel.unary_stream(PATHS[service])(request, timeout=TIMEOUT_S)
    try:
        return len([answer async for answer in call])
    except grpc.aio.AioRpcError as error:
        raise error_from_status(error, service) from error


def prompt_of(*parts: prompt_pb2.Part) -> prompt_pb2.Prompt:
    return prompt_pb2.Prompt(messages=[prompt_pb2.Message(role=prompt_pb2.ROLE_USER, parts=parts)])


def text(words: str) -> prompt_pb2.Part:
    return prompt_pb2.Part(text=words)


def picture(data: bytes) -> prompt_pb2.Part:
    return prompt_pb2.Part(image=prompt_pb2.Media(data=data))


HALF = bytes(MAX_INLINE_BYTES // 2 + 1)
TOO_MUCH = {
    "parts": (prompt_of(*[text("")] * MAX_PARTS), f"{MAX_PARTS + 1} messages and parts, at most {MAX_PARTS}"),
    "messages": (
        prompt_pb2.Prompt(messages=[prompt_pb2.Message(role=prompt_pb2.ROLE_USER)] * 10**6),
        f"{10**6} messages and parts, at most {MAX_PARTS}",
    ),
    "media": (prompt_of(*[prompt_pb2.Part(image=prompt_pb2.Media(path="x"))] * 513), "513 media, at most 512"),
    "text": (prompt_of(text("é" * (MAX_TEXT_BYTES // 2)), text("x")), f"{MAX_TEXT_BYTES + 1} bytes of text, at most"),
    "inline media": (prompt_of(picture(HALF), picture(HALF)), f"{2 * len(HALF)} bytes of inline media, at most"),
}


@pytest.mark.parametrize("service", PATHS)
async def test_oversized_and_malformed_requests_are_refused_before_a_peer_is_called(
    service: str, tmp_path: Path, tiny_checkpoint: Path, tower: Tower
) -> None:
    async with (
        started(service, tmp_path, tiny_checkpoint, tower) as (address, peers_asked),
        open_channel(address) as channel,
    ):
        for prompt, complaint in TOO_MUCH.values():
            with pytest.raises(errors.InvalidRequest, match=f"^prompt.messages hold {complaint}"):
                await answers(channel, service, asking(service, prompt))
        no_text = asking(service, prompt_of(text("moves"))).replace(b"moves", b"\xff\xfeves")
        for request in (b"\xff" * 40, b"\x0a\x7fabc", b"\x0b", no_text):
            with pytest.raises(errors.InvalidRequest, match=rf"^a request of {len(request)} bytes is no message"):
                await answers(channel, service, request)
        assert peers_asked() == 0
        assert await answers(channel, service, asking(service, prompt_of(text("What moves?")))) >= 1


async def test_a_second_request_of_a_stream_that_is_no_message_is_refused_too(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    async with preprocessing(tmp_path, tiny_checkpoint) as address, open_channel(address) as channel:
        requests = iter([asking("preprocessing", prompt_of(text("What moves?"))), b"\xff"])
        call = channel.stream_stream(PATHS["preprocessing"])(requests, timeout=TIMEOUT_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [answer async for answer in call]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
