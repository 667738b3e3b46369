"""Quotas of clients: what exceeds them is refused, other clients are served, and every end of a request frees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.channels import open_channel
from common.contract.errors import InvalidRequest, Overloaded
from common.security.quotas import Charge, ClientQuotas
from framesieve.client.credentials import Access, credentials_of
from framesieve.v1 import encoder_pb2, encoder_pb2_grpc, prompt_pb2
from tests.certificates import Authority
from tests.common.guarded_service import (
    ALICE,
    BOB,
    Echo,
    GuardedService,
    ask,
    guarded,
    refusal,
    select,
    shown,
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


async def test_a_request_above_the_quota_is_refused_and_other_clients_are_served(tmp_path: Path, tokens: Path) -> None:
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


# --- quotas by themselves ----------------------------------------------------------------------------------------

MAX_REQUESTS, MAX_BYTES = 2, 10
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from(["alice", "bob"])),
        st.tuples(st.just("charge"), st.integers(0, 9), st.integers(0, 12)),
        st.tuples(st.just("end"), st.integers(0, 9)),
    ),
    max_size=40,
)


class Running:
    """A running request of the model, and the bytes counted for it."""

    def __init__(self, client: str, context: ExitStack, charge: Charge) -> None:
        self.client, self.context, self.charge, self.size_bytes = client, context, charge, 0


@given(STEPS)
def test_a_client_gets_exactly_what_its_quota_leaves(steps: list[tuple[Any, ...]]) -> None:
    quotas = ClientQuotas(MAX_REQUESTS, MAX_BYTES)
    running: list[Running] = []
    for kind, *arguments in steps:
        requests = Counter(each.client for each in running)
        assert quotas.clients == len(requests)
        if kind == "begin":
            (client,) = arguments
            context = ExitStack()
            if requests[client] == MAX_REQUESTS:
                with pytest.raises(Overloaded, match=f"{client} has 2 requests"):
                    context.enter_context(quotas.request(client))
                continue
            running.append(Running(client, context, context.enter_context(quotas.request(client))))
        elif running:
            one = running[arguments[0] % len(running)]
            if kind == "end":
                one.context.close()
                running.remove(one)
            elif one.size_bytes + arguments[1] > MAX_BYTES:
                with pytest.raises(InvalidRequest, match=f"has {one.size_bytes + arguments[1]} bytes"):
                    one.charge(arguments[1])
            elif sum(each.size_bytes for each in running if each.client == one.client) + arguments[1] > MAX_BYTES:
                with pytest.raises(Overloaded, match="to add"):
                    one.charge(arguments[1])
            else:
                one.charge(arguments[1])
                one.size_bytes += arguments[1]
    for each in running:
        each.context.close()
    assert quotas.clients == 0
