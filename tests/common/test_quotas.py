"""Quotas of clients: what exceeds them is refused, other clients are served, and every end of a request frees them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from gridsieve.client.credentials import Access, credentials_of
from gridsieve.common.channels import open_channel
from gridsieve.common.contract.errors import InvalidRequest, Overloaded
from gridsieve.common.security.quotas import ClientQuotas
from gridsieve.v1 import encoder_pb2, encoder_pb2_grpc, prompt_pb2
from tests.certificates import Authority
from tests.common.guarded_service import (
    Echo,
    GuardedService,
    ask,
    guarded,
    refusal,
    select,
    tcp_address,
)
from tests.common.loopback import TIMEOUT_S, eventually

MIB = 2**20


@asynccontextmanager
async def service(folder: Path, **settings: Any) -> AsyncIterator[tuple[GuardedService, grpc.aio.Channel]]:
    async with guarded(f"unix:{folder}/s", Echo(), **settings) as running, open_channel(running.address) as channel:
        yield running, channel


async def running_call(channel: grpc.aio.Channel, *requests: encoder_pb2.EncodeRequest, **call: Any) -> Any:
    """A running call, all of whose requests were answered."""
    stream = encoder_pb2_grpc.EncoderServiceStub(channel).Encode(timeout=TIMEOUT_S, **call)
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
    return request


@pytest.mark.parametrize("end", ["finished", "cancelled", "failed", "vanished"])
async def test_every_end_of_a_request_frees_its_quota(tmp_path: Path, end: str) -> None:
    limits = {"max_requests_per_client": 1, "max_bytes_per_client": MIB}
    async with service(tmp_path, **limits) as (running, channel), open_channel(running.address) as caller:
        call = await running_call(caller, prompt(MIB))
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


async def test_all_messages_of_a_request_count_and_one_above_the_whole_quota_is_invalid(tmp_path: Path) -> None:
    async with service(tmp_path, max_bytes_per_client=MIB) as (running, channel):
        assert select(1).ByteSize() == 4
        call = await running_call(channel, prompt(MIB - 10), select(1), select(1))
        await call.write(select(1))
        assert await refusal(call.read()) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_REQUEST",
            f"the request has {MIB + 2} bytes, --max-bytes-per-client is {MIB}",
        )
        await eventually(lambda: not running.quotas.clients)


async def test_clients_without_tokens_are_told_apart_by_certificate_or_address(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, alice, bob = (authority.issue(name) for name in ("127.0.0.1", "alice.test", "bob.test"))

    async def names_of_two(**settings: Any) -> list[str]:
        """The client names in the refusals of two callers."""
        tls = {"tls_cert": own.cert, "tls_key": own.key, **settings}
        names = []
        for certificate in (alice, bob):
            access = Access(tls_ca=authority.path, tls_cert=certificate.cert, tls_key=certificate.key)
            async with (
                guarded(tcp_address(), Echo(), max_requests_per_client=1, **tls) as running,
                open_channel(running.address, credentials_of(access)) as channel,
            ):
                held = await running_call(channel)
                names.append((await refusal(ask(channel)))[2].split(" has ")[0])
                held.cancel()
        return names

    assert await names_of_two(tls_client_ca=authority.path) == ["alice.test", "bob.test"]
    assert await names_of_two() == ["ipv4:127.0.0.1"] * 2


def test_a_client_gets_exactly_what_its_quota_leaves() -> None:
    quotas = ClientQuotas(max_requests=2, max_bytes=10)
    with quotas.request("alice") as first, quotas.request("bob") as bob:
        first(4)
        bob(10)
        with quotas.request("alice") as second:
            second(5)
            with pytest.raises(Overloaded, match="alice has 4 bytes in running requests, this request has 7 more"):
                second(2)
            with pytest.raises(InvalidRequest, match="the request has 11 bytes"):
                second(6)
            second(1)
            with pytest.raises(Overloaded, match="alice has 2 requests"), quotas.request("alice"):
                pass
        first(6)
        assert quotas.clients == 2
    assert quotas.clients == 0


def test_all_clients_together_have_a_limit() -> None:
    quotas = ClientQuotas(max_total=2)
    refused = pytest.raises(Overloaded, match="2 requests run or wait, --max-requests is 2")
    with quotas.request("alice"), quotas.request("bob"), refused, quotas.request("carol"):
        pass
    with quotas.request("carol"), quotas.request("carol"):
        pass
