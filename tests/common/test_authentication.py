"""Bearer tokens at a listener: a caller without a known one is refused before its request is read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import REGISTRY

from gridsieve.client.credentials import Access, credentials_of
from gridsieve.common.channels import open_channel, upstream_errors
from gridsieve.common.contract.errors import PeerContract, StartupError
from gridsieve.common.security.credentials import Credentials
from gridsieve.common.serving.interceptors import passed_on
from gridsieve.v1 import encoder_pb2, encoder_pb2_grpc
from tests.common.guarded_service import (
    ALICE,
    BOB,
    METHOD,
    Echo,
    GuardedService,
    ask,
    encode_of,
    guarded,
    refusal,
    shown,
    well,
)
from tests.common.loopback import TIMEOUT_S

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
# What is a known token is in test_tokens.py.
WRONG = {
    "none": (),
    "unknown": (("authorization", f"Bearer {ALICE}0"),),
    "two": (("authorization", f"Bearer {ALICE}"), ("authorization", f"Bearer {BOB}")),
}


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
async def service(tmp_path: Path, echo: Echo, tokens: Path) -> AsyncIterator[GuardedService]:
    async with guarded(f"unix:{tmp_path}/s", echo, auth_tokens_file=tokens) as running:
        yield running


@pytest.fixture
async def channel(service: GuardedService) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(service.address) as connected:
        yield connected


async def test_calls_without_a_known_token_are_refused(echo: Echo, channel: grpc.aio.Channel) -> None:
    expected = (UNAUTHENTICATED, "UNAUTHENTICATED", "the call must carry a valid bearer token")
    for metadata in WRONG.values():
        assert await refusal(ask(channel, metadata=metadata)) == expected
    assert not echo.calls
    assert [await ask(channel, 1, **shown(ALICE)), await ask(channel, 2, **shown(BOB))] == [1, 2]


async def test_a_call_is_refused_before_its_request_is_read(service: GuardedService, channel: grpc.aio.Channel) -> None:
    silent = encoder_pb2_grpc.EncoderServiceStub(channel).Encode(timeout=TIMEOUT_S)
    assert (await refusal(silent.read()))[0] is UNAUTHENTICATED
    garbage = channel.stream_stream(METHOD)(iter([b"\xff" * 1000]), timeout=TIMEOUT_S)
    assert (await refusal(garbage.read()))[0] is UNAUTHENTICATED
    assert service.quotas.clients == 0


async def test_health_needs_no_token_and_reflection_does(channel: grpc.aio.Channel) -> None:
    def listing(**call: Any) -> Any:
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        return reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests, **call)

    assert await well(channel)
    assert (await refusal(listing().read()))[0] is UNAUTHENTICATED
    assert (await listing(**shown(ALICE)).read()).HasField("list_services_response")


async def test_unknown_methods_create_no_labels(channel: grpc.aio.Channel) -> None:
    for path in ("/gridsieve.v1.EncoderService/Invented", "/invented.Service/Invented"):
        assert (await refusal(channel.unary_unary(path)(b"", timeout=TIMEOUT_S)))[0] is grpc.StatusCode.UNIMPLEMENTED
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    assert not [sample for sample in samples if "Invented" in sample.labels.values()]


# --- tokens of services and clients ---------------------------------------------------------------------


class Forwarding(encoder_pb2_grpc.EncoderServiceServicer):
    """Forwards each request to another encoder with its own token."""

    def __init__(self, upstream: grpc.aio.Channel, token: str) -> None:
        self._upstream = encode_of(upstream)
        self._credentials = Credentials(token=token)

    async def Encode(self, requests: Any, context: Any) -> AsyncIterator[encoder_pb2.EncodeResponse]:
        with upstream_errors("encoder"):
            async for response in self._upstream(await anext(aiter(requests)), **passed_on(context, self._credentials)):
                yield response


async def test_a_service_sends_its_own_token_upstream_and_a_refused_one_is_an_internal_error(
    tmp_path: Path, echo: Echo, channel: grpc.aio.Channel
) -> None:
    async with (
        guarded(f"unix:{tmp_path}/known", Forwarding(channel, BOB)) as known,
        guarded(f"unix:{tmp_path}/unknown", Forwarding(channel, "nobody-0123456789abc")) as unknown,
        open_channel(known.address) as to_known,
        open_channel(unknown.address) as to_unknown,
    ):
        code, reason, message = await refusal(ask(to_unknown, **shown(ALICE)))
        assert (code, reason, echo.calls) == (grpc.StatusCode.INTERNAL, PeerContract.reason, 0)
        assert "token" not in message
        assert await ask(to_known, 4, **shown("carol-0123456789abc")) == 4


@pytest.mark.parametrize(
    ("address", "private"),
    [
        ("unix:/run/generation.sock", True),
        ("[::1]:50053", True),
        ("localhost:50053", True),
        ("127.0.0.1:1,127.0.0.2:2", True),
        ("dns:///localhost:50053", True),
        ("10.0.0.7:50053", False),
        ("unix-gpu1:50053", False),
        ("dns:///generation:50053", False),
        ("127.0.0.1:1,10.0.0.7:2", False),
        ("127.0.0.1.example.org:50053", False),
    ],
)
async def test_a_token_goes_to_other_machines_in_plain_text_only_if_allowed(address: str, private: bool) -> None:
    if private:
        await open_channel(address, credentials_of(Access(token=ALICE))).close()
        return
    with pytest.raises(StartupError, match="in plain text") as info:
        open_channel(address, credentials_of(Access(token=ALICE)))
    assert ALICE not in str(info.value)
    await open_channel(address, credentials_of(Access(token=ALICE, allow_plaintext_token=True))).close()
