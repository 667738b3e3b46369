"""Calls that are refused once they have answered, while their callers write on: who calls is told why."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest

from client.selecting import EVERYTHING, answers
from common.channels import DETAILS_KEY, open_channel, status_details, upstream_errors
from common.errors import MediaDamaged
from common.room import Room
from common.wire import plan_messages
from framesieve.v1 import encoder_pb2_grpc, prompt_pb2
from framesieve.v1.encoder_pb2 import EncodePrompt, EncodeRequest, EncodeResponse
from framesieve.v1.preprocessing_pb2 import PreprocessResponse
from services.encoder.frames import Expectation, FrameStream
from services.encoder.patches import PatchShape
from services.generation.media import MediaClient
from tests.contract.encoder_peers import FINGERPRINT, VIDEO, plan_of, prompt_of
from tests.contract.generation_peers import prompt_message
from tests.contract.loopback import TIMEOUT_S, speaking
from tests.contract.media_client import MODEL as GENERATION
from tests.contract.media_client import PLAN, SIZE_BYTES, ask

# grpc.aio's own `write` loses the reason of nearly all such calls.
CALLS = 20
REFUSAL = MediaDamaged("1 of its 4 frames cannot be decoded")
PATCHES = PatchShape(patch_px=2, merge=2, temporal_patch=2)
FRAMES_OF = "/framesieve.v1.PreprocessingService/Preprocess"
EMBEDS_OF = "/framesieve.v1.EncoderService/Encode"

Once: TypeAlias = Callable[[], Awaitable[Any]]


@asynccontextmanager
async def refusing(folder: Path, method: str, plan: bytes) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a service that sends this plan and refuses, without a look at what is selected."""

    async def refuse(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        await anext(requests)
        yield plan
        details = ((DETAILS_KEY, status_details(REFUSAL).SerializeToString()),)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(REFUSAL), details)

    address = f"unix:{folder}/refusing"
    async with speaking(address, method, refuse), open_channel(address) as channel:
        yield channel


@asynccontextmanager
async def encoder_asks(folder: Path) -> AsyncIterator[Once]:
    plan = plan_of([VIDEO], PATCHES, 1)
    (sent,) = plan_messages(plan)

    async def once() -> None:
        frames = FrameStream(channel, {"timeout": TIMEOUT_S}, Expectation(PATCHES, 1, FINGERPRINT))
        planned = await frames.plan(prompt_of([VIDEO]), {})
        await frames.select(0, planned.media[0])
        await frames.all_selected()
        _ = [each async for each in frames.slices()]

    async with refusing(folder, FRAMES_OF, PreprocessResponse(plan=sent).SerializeToString()) as channel:
        yield once


@asynccontextmanager
async def generation_asks(folder: Path) -> AsyncIterator[Once]:
    (sent,) = plan_messages(PLAN)
    async with refusing(folder, EMBEDS_OF, EncodeResponse(plan=sent).SerializeToString()) as channel:
        client = MediaClient(channel, channel, GENERATION, Room(SIZE_BYTES))
        yield lambda: ask(client)


@asynccontextmanager
async def a_user_asks(folder: Path) -> AsyncIterator[Once]:
    (sent,) = plan_messages(PLAN)
    prompt = EncodeRequest(prompt=EncodePrompt(prompt=prompt_message(PLAN), pruning=prompt_pb2.Pruning(rate=0.5)))

    async def once() -> None:
        call = encoder_pb2_grpc.EncoderServiceStub(channel).Encode(timeout=TIMEOUT_S)
        with upstream_errors("encoder"):
            _ = [each async for each in answers(call, prompt, EncodeRequest(select=EVERYTHING))]

    async with refusing(folder, EMBEDS_OF, EncodeResponse(plan=sent).SerializeToString()) as channel:
        yield once


@pytest.mark.parametrize("caller", [encoder_asks, generation_asks, a_user_asks])
async def test_who_is_refused_while_it_selects_hears_why(
    tmp_path: Path, caller: Callable[[Path], AbstractAsyncContextManager[Once]]
) -> None:
    async with caller(tmp_path) as once:
        for _ in range(CALLS):
            with pytest.raises(MediaDamaged, match=str(REFUSAL)):
                await once()
