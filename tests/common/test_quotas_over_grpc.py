"""What one client may have running at a real listener: more is refused, others are served, and every end frees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from common.channels import error_from_status, open_channel
from common.contract.errors import Overloaded
from framesieve.client.credentials import Access, credentials_of
from framesieve.v1 import encoder_pb2, encoder_pb2_grpc, prompt_pb2
from tests.certificates import Authority
from tests.common.guarded_service import (
    ALICE,
    BOB,
    TIMEOUT_S,
    Echo,
    GuardedService,
    ask,
    guarded,
    refusal,
    select,
    shown,
    tcp_address,
)
from tests.common.loopback import eventually

MIB = 2**20


@asynccontextmanager
async def service(folder: Path, **settings: Any) -> AsyncIterator[tuple[GuardedService, grpc.aio.Channel]]:
    async with guarded(f"unix:{folder}/s", Echo(), **settings) as running, open_channel(running.address) as channel:
        yield running, channel


async def running_call(channel: grpc.aio.Channel, *requests: encoder_pb2.EncodeRequest, **call: Any) -> Any:
    """A call that has been answered as often as it has asked, and goes on."""
    stream = encoder_pb2_grpc.EncoderServiceStub(channel).Encode(timeout=call.pop("timeout", TIMEOUT_S), **call)
    for request in requests or (select(1),):
        await stream.write(request)
        await stream.read()
    return stream


def prompt(size_bytes: int) -> encoder_pb2.EncodeRequest:
    """A request of exactly that size."""
    request = encoder_pb2.EncodeRequest()
    image = request.prompt.prompt.messages.add(role=prompt_pb2.ROLE_USER).parts.add().image
    image.data = bytes(size_bytes)
    image.data = bytes(2 * size_bytes - request.ByteSize())
    assert request.ByteSize() == size_bytes
    return request


async def test_one_request_too_many_is_refused_with_the_limit_and_costs_other_clients_nothing(
    tmp_path: Path, tokens: Path
) -> None:
    async with service(tmp_path, auth_tokens_file=tokens, max_requests_per_client=2) as (_, channel):
        held = [await running_call(channel, **shown(ALICE)) for _ in range(2)]
        assert await refusal(ask(channel, **shown(ALICE))) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "OVERLOADED",
            "alice has 2 requests running, --max-requests-per-client is 2",
        )
        assert await ask(channel, 3, **shown(BOB)) == 3
        for call in held:
            call.cancel()


async def test_a_refusal_says_when_to_come_again(tmp_path: Path) -> None:
    async with service(tmp_path, max_requests_per_client=1) as (_, channel):
        held = await running_call(channel)
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await ask(channel)
        error = error_from_status(info.value, "encoder")
        assert isinstance(error, Overloaded)
        assert error.retry_after_s == 1
        assert len(rpc_status.from_call(info.value).details) == 2
        held.cancel()


@pytest.mark.parametrize("end", ["finished", "cancelled", "failed", "deadline", "vanished"])
async def test_what_a_request_held_is_free_however_it_ends(tmp_path: Path, end: str) -> None:
    limits = {"max_requests_per_client": 1, "max_bytes_per_client": MIB}
    async with service(tmp_path, **limits) as (running, channel), open_channel(running.address) as caller:
        call = await running_call(caller, prompt(MIB), timeout=2 if end == "deadline" else TIMEOUT_S)
        assert (await refusal(ask(channel)))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        match end:
            case "finished":
                await call.done_writing()
                assert await call.read() is grpc.aio.EOF
            case "cancelled":
                call.cancel()
            case "failed":
                await call.write(select(-1))
            case "vanished":
                await caller.close()
        await eventually(lambda: not running.quotas.clients)
        assert await ask(channel, 9) == 9


async def test_bytes_of_all_of_a_clients_running_requests_count_together(tmp_path: Path, tokens: Path) -> None:
    async with service(tmp_path, auth_tokens_file=tokens, max_bytes_per_client=MIB) as (_, channel):
        first = await running_call(channel, prompt(600_000), **shown(ALICE))
        over = encoder_pb2_grpc.EncoderServiceStub(channel).Encode(iter([prompt(MIB - 600_000 + 1)]), **shown(ALICE))
        assert await refusal(over.read()) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "OVERLOADED",
            f"alice has requests of 600000 bytes running and one of {MIB - 600_000 + 1} to add, "
            f"--max-bytes-per-client is {MIB}",
        )
        fits = await running_call(channel, prompt(MIB - 600_000), **shown(ALICE))
        other = await running_call(channel, prompt(MIB), **shown(BOB))
        for call in (first, fits, other):
            call.cancel()


async def test_a_request_that_can_never_fit_is_wrong_and_not_one_to_send_again(tmp_path: Path) -> None:
    async with service(tmp_path, max_bytes_per_client=MIB) as (running, channel):
        call = encoder_pb2_grpc.EncoderServiceStub(channel).Encode(iter([prompt(MIB + 1)]))
        assert await refusal(call.read()) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_REQUEST",
            f"the request has {MIB + 1} bytes, --max-bytes-per-client is {MIB}",
        )
        await eventually(lambda: not running.quotas.clients)


async def test_later_messages_of_a_stream_count_as_well(tmp_path: Path) -> None:
    async with service(tmp_path, max_bytes_per_client=MIB) as (running, channel):
        assert select(1).ByteSize() == 4
        call = await running_call(channel, prompt(MIB - 10), select(1), select(1))
        await call.write(select(1))
        assert (await refusal(call.read()))[2] == f"the request has {MIB + 2} bytes, --max-bytes-per-client is {MIB}"
        await eventually(lambda: not running.quotas.clients)


async def test_without_tokens_a_client_is_its_certificate_and_without_that_its_address(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, alice, bob = (authority.issue(name) for name in ("127.0.0.1", "alice.test", "bob.test"))
    tls = {"tls_cert": own.cert, "tls_key": own.key}

    async def names_of_two(**settings: Any) -> list[str]:
        """What two callers are called when each asks for more than it may."""
        async with guarded(tcp_address(), Echo(), max_requests_per_client=1, **tls, **settings) as running:
            names = []
            for shown in (alice, bob):
                access = Access(tls_ca=authority.path, tls_cert=shown.cert, tls_key=shown.key)
                async with open_channel(running.address, credentials_of(access)) as channel:
                    held = await running_call(channel)
                    names.append((await refusal(ask(channel)))[2].split(" has ")[0])
                    held.cancel()
                    await eventually(lambda: not running.quotas.clients)
            return names

    assert await names_of_two(tls_client_ca=authority.path) == ["alice.test", "bob.test"]
    assert await names_of_two() == ["ipv4:127.0.0.1"] * 2


async def test_two_connections_of_one_address_are_one_client(tmp_path: Path) -> None:
    async with (
        guarded(tcp_address(), Echo(), max_requests_per_client=1) as running,
        open_channel(running.address) as one,
        grpc.aio.insecure_channel(running.address, [("grpc.use_local_subchannel_pool", 1)]) as other,
    ):
        held = await running_call(one)
        assert (await refusal(ask(other)))[1] == "OVERLOADED"
        held.cancel()


async def test_a_crowd_at_once_is_let_in_up_to_its_limit_and_leaves_no_trace(tmp_path: Path) -> None:
    async with service(tmp_path, max_requests_per_client=20) as (running, channel):
        calls = [asyncio.ensure_future(running_call(channel)) for _ in range(60)]
        await asyncio.wait(calls)
        let_in = [call.result() for call in calls if call.exception() is None]
        assert len(let_in) == 20
        assert {call.exception().code() for call in calls if call.exception()} == {  # type: ignore[union-attr]
            grpc.StatusCode.RESOURCE_EXHAUSTED
        }
        for call in let_in:
            call.cancel()
        await eventually(lambda: not running.quotas.clients)
