"""Bearer tokens at a listener: a caller without a known one is refused before its request is read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import REGISTRY

from common.channels import open_channel, upstream_errors
from common.contract.errors import PeerContract, StartupError, Unauthenticated
from common.security.credentials import Credentials
from common.serving.interceptors import passed_on
from framesieve.client.credentials import Access, credentials_of
from framesieve.client.encoding import encode
from framesieve.client.prompt import Video
from framesieve.v1 import encoder_pb2, encoder_pb2_grpc
from tests.common.guarded_service import (
    ALICE,
    BOB,
    METHOD,
    TIMEOUT_S,
    Echo,
    GuardedService,
    ask,
    guarded,
    refusal,
    shown,
    well,
)

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
WRONG = {
    "none": (),
    "unknown": (("authorization", "Bearer mallory-0123456789abc"),),
    "of another scheme": (("authorization", f"Basic {ALICE}"),),
    "without a scheme": (("authorization", ALICE),),
    "empty": (("authorization", ""),),
    "a name": (("authorization", "Bearer alice"),),
    "nearly": (("authorization", f"Bearer {ALICE}0"),),
    "two": (("authorization", f"Bearer {ALICE}"), ("authorization", f"Bearer {BOB}")),
    "elsewhere": (("x-api-key", ALICE),),
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
    for metadata in WRONG.values():
        assert await refusal(ask(channel, metadata=metadata)) == (
            UNAUTHENTICATED,
            "UNAUTHENTICATED",
            "the call needs a known bearer token",
        )
    assert not echo.calls
    assert [await ask(channel, 1, **shown(ALICE)), await ask(channel, 2, **shown(BOB))] == [1, 2]


async def test_a_call_is_refused_before_its_request_is_read(service: GuardedService, channel: grpc.aio.Channel) -> None:
    silent = encoder_pb2_grpc.EncoderServiceStub(channel).Encode(timeout=TIMEOUT_S)
    assert (await refusal(silent.read()))[0] is UNAUTHENTICATED
    garbage = channel.stream_stream(METHOD)(iter([b"\xff" * 1000]), timeout=TIMEOUT_S)
    assert (await refusal(garbage.read()))[0] is UNAUTHENTICATED
    assert service.quotas.clients == 0


async def test_health_needs_no_token_and_reflection_does(channel: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    assert await well(channel)
    watched = health.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert (await watched.read()).status == health_pb2.HealthCheckResponse.SERVING
    watched.cancel()

    def listing(**call: Any) -> Any:
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        return reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests, **call)

    assert (await refusal(listing().read()))[0] is UNAUTHENTICATED
    known = await listing(**shown(ALICE)).read()
    assert "framesieve.v1.EncoderService" in [each.name for each in known.list_services_response.service]


async def test_refusals_are_counted_and_unknown_methods_create_no_labels(channel: grpc.aio.Channel) -> None:
    def refused() -> float:
        labels = {"method": "Encode", "reason": "UNAUTHENTICATED"}
        return REGISTRY.get_sample_value("framesieve_refusals_total", labels) or 0.0

    before = refused()
    await refusal(ask(channel))
    assert refused() == before + 1
    for path in ("/framesieve.v1.EncoderService/Invented", "/invented.Service/Invented"):
        assert (await refusal(channel.unary_unary(path)(b"", timeout=TIMEOUT_S)))[0] is grpc.StatusCode.UNIMPLEMENTED
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    assert not [sample for sample in samples if "Invented" in sample.labels.values()]


# --- tokens of services and clients ---------------------------------------------------------------------


class Forwarding(encoder_pb2_grpc.EncoderServiceServicer):
    """Forwards each request to another encoder with its own token."""

    def __init__(self, upstream: grpc.aio.Channel, token: str) -> None:
        self._upstream = encoder_pb2_grpc.EncoderServiceStub(upstream)
        self._credentials = Credentials(token=token)

    async def Encode(self, requests: Any, context: Any) -> AsyncIterator[encoder_pb2.EncodeResponse]:
        with upstream_errors("encoder"):
            async for response in self._upstream.Encode(requests, **passed_on(context, self._credentials)):
                yield response


@pytest.mark.parametrize(("own", "answered"), [(BOB, True), ("nobody-0123456789abc", False)])
async def test_a_service_sends_its_own_token_upstream_and_a_refused_one_is_an_internal_error(
    tmp_path: Path, echo: Echo, channel: grpc.aio.Channel, own: str, answered: bool
) -> None:
    callers = tmp_path / "callers"
    callers.write_text("carol carol-0123456789abc\n")
    callers.chmod(0o600)
    async with (
        guarded(f"unix:{tmp_path}/t", Forwarding(channel, own), auth_tokens_file=callers) as between,
        open_channel(between.address) as caller,
    ):
        asked = ask(caller, 4, **shown("carol-0123456789abc"))
        if answered:
            assert await asked == 4
            return
        code, reason, message = await refusal(asked)
        assert (code, reason) == (grpc.StatusCode.INTERNAL, PeerContract.reason)
        assert "token" not in message
        assert not echo.calls


async def test_a_client_that_is_refused_while_it_writes_gets_the_status(service: GuardedService) -> None:
    for _ in range(20):
        with pytest.raises(Unauthenticated):
            await encode(service.address, Video(data=b"no clip"))


@pytest.mark.parametrize(
    ("address", "private"),
    [
        ("unix:/run/generation.sock", True),
        ("127.0.0.1:50053", True),
        ("[::1]:50053", True),
        ("localhost:50053", True),
        ("127.0.0.1:1,127.0.0.2:2", True),
        ("dns:///localhost:50053", True),
        ("10.0.0.7:50053", False),
        ("unix-gpu1:50053", False),
        ("generation:50053", False),
        ("dns:///generation:50053", False),
        ("127.0.0.1:1,10.0.0.7:2", False),
        ("127.0.0.1.example.org:50053", False),
    ],
)
async def test_a_token_goes_to_other_machines_in_plain_text_only_if_allowed(address: str, private: bool) -> None:
    credentials = credentials_of(Access(token=ALICE))
    assert ALICE not in repr(credentials)
    if private:
        await open_channel(address, credentials).close()
        return
    with pytest.raises(StartupError, match="in plain text") as info:
        open_channel(address, credentials)
    assert address in str(info.value)
    assert ALICE not in str(info.value)
    await open_channel(address, credentials_of(Access(token=ALICE, allow_plaintext_token=True))).close()
