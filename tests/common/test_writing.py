"""Calls that are refused while their callers still write: the callers get the status, not INTERNAL."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import AsyncMock, Mock

import grpc
import pytest

from common.byte_semaphore import ByteSemaphore
from common.channels import end_writing, open_channel, upstream_errors, write_to
from common.contract.errors import Overloaded
from common.contract.plan import PromptPlan
from common.contract.wire import plan_messages
from framesieve.client.encoding import SELECT_ALL, responses
from framesieve.v1 import encoder_pb2_grpc, prompt_pb2
from framesieve.v1.encoder_pb2 import EncodePrompt, EncodeRequest, EncodeResponse
from framesieve.v1.preprocessing_pb2 import PreprocessResponse
from services.encoder.items.preprocess_stream import PlanCheck, PreprocessStream
from services.encoder.tower.patches import PatchShape
from services.generation.rpc.media import MediaClient
from services.generation.rpc.timing import StageClock
from tests.common.loopback import TIMEOUT_S
from tests.common.refusing_peer import REFUSAL
from tests.encoder.encoder_peers import FINGERPRINT, VIDEO, plan_of, prompt_of
from tests.generation.generation_peers import prompt_message
from tests.generation.media_client import MODEL, PLAN, PRUNING, SIZE_BYTES, receive_all

# grpc.aio's own `write` loses the status of most of these calls.
CALLS = 20
PATCHES = PatchShape(patch_px=2, merge=2, temporal_patch=2)
FRAMES_PLAN = plan_of([VIDEO], PATCHES, 1)
FRAMES_OF = "/framesieve.v1.PreprocessingService/Preprocess"
EMBEDS_OF = "/framesieve.v1.EncoderService/Encode"

Ask: TypeAlias = Callable[[grpc.aio.Channel, str], Awaitable[Any]]


async def encoder_asks(channel: grpc.aio.Channel, text: str) -> None:
    stream = PreprocessStream(channel, {"timeout": TIMEOUT_S}, PlanCheck(PATCHES, 1, FINGERPRINT))
    plan = await stream.plan(saying(text, prompt_of([VIDEO])), {})
    await stream.lead(0, Mock(plan=plan.media[0], reserve=AsyncMock()))
    await stream.all_selected()
    await stream.finished()


async def generation_asks(channel: grpc.aio.Channel, text: str) -> None:
    client, clock = MediaClient(channel, channel, MODEL, ByteSemaphore(SIZE_BYTES)), StageClock()
    async with client.open(saying(text, prompt_message(PLAN)), PRUNING, clock, timeout=TIMEOUT_S) as session:
        await receive_all(session, clock)


async def user_asks(channel: grpc.aio.Channel, text: str) -> None:
    prompt = EncodeRequest(prompt=EncodePrompt(prompt=saying(text, prompt_message(PLAN)), pruning=PRUNING))
    call = encoder_pb2_grpc.EncoderServiceStub(channel).Encode(timeout=TIMEOUT_S)
    with upstream_errors("encoder"):
        _ = [each async for each in responses(call, prompt, EncodeRequest(select=SELECT_ALL))]


def saying(text: str, prompt: prompt_pb2.Prompt) -> prompt_pb2.Prompt:
    prompt.messages[0].parts.add().text = text
    return prompt


@asynccontextmanager
async def refusing(folder: Path, method: str, plan: PromptPlan | None) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a service that refuses every call, behind the plan if there is one.

    It runs in a process of its own, so that it answers while the caller is busy writing.
    """
    planned: list[str] = []
    if plan is not None:
        kind = PreprocessResponse if method == FRAMES_OF else EncodeResponse
        planned = [kind(plan=sent).SerializeToString().hex() for sent in plan_messages(plan)]
    address = f"unix:{folder}/refusing"
    command = (sys.executable, "-m", "tests.common.refusing_peer", address, method, *planned)
    peer = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parents[2])
    try:
        async with open_channel(address) as channel:
            await asyncio.wait_for(channel.channel_ready(), TIMEOUT_S)
            yield channel
    finally:
        peer.kill()
        await peer.wait()


@pytest.mark.parametrize(
    ("asks", "method", "plan"),
    [
        (encoder_asks, FRAMES_OF, FRAMES_PLAN),
        (generation_asks, EMBEDS_OF, PLAN),
        (user_asks, EMBEDS_OF, None),
    ],
    ids=["encoder, selecting", "generation, selecting", "user, writing a prompt"],
)
async def test_a_caller_that_is_refused_while_it_writes_gets_the_status(
    tmp_path: Path, asks: Ask, method: str, plan: PromptPlan | None
) -> None:
    text = "What moves?" if plan else "x" * 2**21
    async with refusing(tmp_path, method, plan) as channel:
        for _ in range(CALLS):
            with pytest.raises(Overloaded, match=str(REFUSAL)) as refused:
                await asks(channel, text)
            assert refused.value.retry_after_s == REFUSAL.retry_after_s


async def test_without_the_private_name_of_grpc_the_public_write_is_used() -> None:
    class Ended:
        """An ended call of a grpcio release without `_cython_call`."""

        async def write(self, request: EncodeRequest) -> None:
            written.append(request)
            raise grpc.aio.InternalError("the call has ended")

        async def done_writing(self) -> None:
            raise grpc.aio.InternalError("a write has failed")

    written: list[EncodeRequest] = []
    request = EncodeRequest(select=SELECT_ALL)
    await write_to(Ended(), request)
    await end_writing(Ended())
    assert written == [request]
