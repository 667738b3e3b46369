"""Calls that are refused while their callers still write: the callers get the status, not INTERNAL."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from gridsieve.client.encoding import SELECT_ALL, responses
from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.channels import open_channel, upstream_errors
from gridsieve.common.contract.errors import Overloaded
from gridsieve.common.contract.wire import plan_messages
from gridsieve.services.generation.stage_clock import StageClock
from gridsieve.services.generation.upstream.media import MediaClient
from gridsieve.v1 import encoder_pb2_grpc
from gridsieve.v1.encoder_pb2 import EncodePrompt, EncodeRequest, EncodeResponse
from tests.common.guarded_service import METHOD
from tests.common.loopback import TIMEOUT_S
from tests.common.refusing_peer import REFUSAL
from tests.generation.generation_peers import prompt_message
from tests.generation.media_client import MODEL, PLAN, PRUNING, SIZE_BYTES, receive_all

# grpc.aio's own `write` loses the status of most of these calls.
CALLS = 20


async def generation_selects(channel: grpc.aio.Channel) -> None:
    client, clock = MediaClient(channel, channel, MODEL, ByteSemaphore(SIZE_BYTES)), StageClock()
    async with client.open(prompt_message(PLAN), PRUNING, clock, timeout=TIMEOUT_S) as session:
        await receive_all(session)


async def user_writes_a_prompt(channel: grpc.aio.Channel) -> None:
    prompt = prompt_message(PLAN)
    prompt.messages[0].parts.add().text = "x" * 2**21
    call = encoder_pb2_grpc.EncoderServiceStub(channel).Encode(timeout=TIMEOUT_S)
    first, second = EncodeRequest(prompt=EncodePrompt(prompt=prompt)), EncodeRequest(select=SELECT_ALL)
    with upstream_errors("encoder"):
        _ = [each async for each in responses(call, first, second)]


@pytest.mark.parametrize(("asks", "planned"), [(generation_selects, True), (user_writes_a_prompt, False)])
async def test_a_caller_that_is_refused_while_it_writes_gets_the_status(
    tmp_path: Path, asks: Callable[[grpc.aio.Channel], Awaitable[Any]], planned: bool
) -> None:
    (message,) = plan_messages(PLAN)
    plan = [EncodeResponse(plan=message).SerializeToString().hex()] if planned else []
    address = f"unix:{tmp_path}/refusing"
    # In a process of its own, so that it answers while the caller is busy writing.
    command = (sys.executable, "-m", "tests.common.refusing_peer", address, METHOD, *plan)
    peer = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parents[2])
    try:
        async with open_channel(address) as channel:
            await asyncio.wait_for(channel.channel_ready(), TIMEOUT_S)
            for _ in range(CALLS):
                with pytest.raises(Overloaded, match=str(REFUSAL)):
                    await asks(channel)
    finally:
        peer.kill()
        await peer.wait()
