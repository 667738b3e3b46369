"""Channels over replicas: addresses, health, retries within a budget, and the errors of failed calls."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from gridsieve.common.affinity import Metadata
from gridsieve.common.channels import (
    ATTEMPTS,
    MAX_RECEIVE_BYTES,
    MEDIA_KEY,
    REPLICA_KEY,
    Reach,
    open_channel,
    upstream_errors,
)
from gridsieve.common.contract.errors import StartupError, Unavailable
from gridsieve.common.process import free_port
from gridsieve.common.retries import Attempts, Retries
from gridsieve.common.serving.health import READY
from gridsieve.common.serving.probe import NO_CREDENTIALS, is_serving
from gridsieve.v1 import encoder_pb2_grpc
from gridsieve.v1.encoder_pb2 import EncodeRequest, EncodeResponse

CALLS = 10
BURST = 200


@dataclass
class Replica(encoder_pb2_grpc.EncoderServiceServicer):
    """Answers with one message, or fails with UNAVAILABLE."""

    address: str
    refuses: bool = False
    calls: int = 0
    received_bytes: int = 0
    health: health_aio.HealthServicer = field(default_factory=health_aio.HealthServicer)

    async def Encode(
        self, requests: AsyncIterator[EncodeRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[EncodeResponse]:
        self.calls += 1
        self.received_bytes = (await anext(requests)).ByteSize()
        if self.refuses:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "draining", ((REPLICA_KEY, self.address),))
        yield EncodeResponse()
        async for _ in requests:
            pass

    async def report(self, status: str) -> None:
        await self.health.set("", health_pb2.HealthCheckResponse.ServingStatus.Value(status))


@asynccontextmanager
async def running(*replicas: Replica, streams: int = 1024) -> AsyncIterator[None]:
    """streams: the calls that run of each connection."""
    servers = []
    for each in replicas:
        options = [("grpc.max_receive_message_length", MAX_RECEIVE_BYTES), ("grpc.so_reuseport", 0)]
        options.append(("grpc.max_concurrent_streams", streams))
        server = grpc.aio.server(options=options)
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(each, server)
        health_pb2_grpc.add_HealthServicer_to_server(each.health, server)
        assert server.add_insecure_port(each.address)
        await server.start()
        await each.report("SERVING")
        servers.append(server)
    try:
        yield
    finally:
        for server in servers:
            await server.stop(None)


async def ask(channel: grpc.aio.Channel, size_bytes: int = 0, metadata: Metadata = ()) -> None:
    call = encoder_pb2_grpc.EncoderServiceStub(channel).Encode(timeout=20, metadata=metadata)
    request = EncodeRequest()
    request.prompt.prompt.messages.add().parts.add().text = "x" * size_bytes
    with upstream_errors("encoder"):
        await call.write(request)
        await call.read()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def ask_both(channel: grpc.aio.Channel, one: Replica, other: Replica) -> None:
    """Asks until both have answered: connecting takes a while."""
    one.calls = other.calls = 0
    async with asyncio.timeout(20):
        while not (one.calls and other.calls):
            await ask(channel)


@pytest.fixture
def sockets(tmp_path: Path) -> tuple[str, str]:
    return f"unix:{tmp_path}/a", f"unix:{tmp_path}/b"


async def test_calls_are_balanced_over_a_list_of_addresses(sockets: tuple[str, str]) -> None:
    for addresses in (sockets, (f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}")):
        one, other = map(Replica, addresses)
        async with running(one, other), open_channel(",".join(addresses)) as channel:
            await ask_both(channel, one, other)
            one.calls = other.calls = 0
            for _ in range(CALLS):
                await ask(channel)
            assert (one.calls, other.calls) == (CALLS / 2, CALLS / 2)


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(f"127.0.0.1:{free_port()}")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy", "grpc_proxy", "https_proxy"):
            monkeypatch.delenv(name, raising=False)
        async with running(replica), open_channel(replica.address) as channel:
            await asyncio.wait_for(ask(channel), 20)
            assert await asyncio.to_thread(is_serving, replica.address, NO_CREDENTIALS, 20)
        with pytest.raises(BlockingIOError):
            proxy.accept()


@pytest.mark.parametrize("address", ["one:50051,two:50051", "127.0.0.1:1,[::1]:1", "unix:/a,127.0.0.1:1"])
def test_a_list_of_names_or_mixed_addresses_is_refused(address: str) -> None:
    with pytest.raises(StartupError, match="must all be ip:port of one version, or all unix:/path"):
        open_channel(address)


async def test_an_unhealthy_replica_gets_no_calls_until_it_is_healthy(sockets: tuple[str, str]) -> None:
    one, other = map(Replica, sockets)
    async with running(one, other), open_channel(",".join(sockets)) as channel:
        await ask_both(channel, one, other)
        await one.report("NOT_SERVING")
        in_a_row = 0
        async with asyncio.timeout(20):  # the change takes a while to arrive
            while in_a_row < CALLS:
                before = one.calls
                await ask(channel)
                in_a_row = in_a_row + 1 if one.calls == before else 0
        await one.report("SERVING")
        await ask_both(channel, one, other)


async def test_a_service_can_be_called_as_soon_as_it_listens_although_its_readiness_was_watched_before(
    sockets: tuple[str, str],
) -> None:
    replica = Replica(sockets[0])
    async with open_channel(replica.address, health=READY) as watched:
        reaches = Reach(watched)
        for _ in range(15):  # what was tried in vain is tried again after up to a second
            assert not reaches()
            await asyncio.sleep(0.1)
        async with running(replica), open_channel(replica.address, by_media=True) as channel:
            await ask(channel, metadata=((MEDIA_KEY, "clip"),))
    assert replica.calls == 1


async def test_a_large_call_that_one_replica_refuses_is_retried_on_another(sockets: tuple[str, str]) -> None:
    one, other = map(Replica, sockets)
    async with running(one, other), open_channel(",".join(sockets)) as channel:
        await ask_both(channel, one, other)
        one.calls, other.calls, one.refuses = 0, 0, True
        for _ in range(2):  # one of them reaches the refusing replica
            await ask(channel, size_bytes=16 * 2**20)
        assert one.calls >= 1
        assert other.calls == 2
        assert other.received_bytes > 16 * 2**20


async def asked(channel: grpc.aio.Channel, replicas: Sequence[Replica], *keys: str) -> list[int]:
    """How many calls each replica got, of one call for each key."""
    before, retries = [each.calls for each in replicas], Retries("encoder", by_media=True)
    for key in keys:
        attempts = Attempts(retries, ((MEDIA_KEY, key),), 20)
        while True:
            try:
                await ask(channel, metadata=attempts.metadata)
                break
            except Unavailable as lost:
                await attempts.next(lost, answered=False)
    return [each.calls - calls for each, calls in zip(replicas, before, strict=True)]


async def test_calls_about_the_same_media_go_to_one_replica_as_long_as_it_serves(tmp_path: Path) -> None:
    replicas = [Replica(f"unix:{tmp_path}/{name}") for name in "abc"]
    addresses = ",".join(each.address for each in replicas)
    async with running(*replicas), open_channel(addresses, by_media=True) as channel:
        home = await asked(channel, replicas, *["clip"] * CALLS)
        assert sorted(home) == [0, 0, CALLS]
        async with open_channel(addresses, by_media=True) as another:
            assert await asked(another, replicas, *["clip"] * CALLS) == home

        place = home.index(CALLS)
        replica = replicas[place]
        replica.refuses = True  # as while it drains
        leaving = asyncio.create_task(replica.report("NOT_SERVING"))
        await asked(channel, replicas, "clip")  # it may be refused before it is answered elsewhere
        await leaving
        elsewhere = await asked(channel, replicas, *["clip"] * CALLS)
        assert sorted(elsewhere) == [0, 0, CALLS]
        assert elsewhere[place] == 0

        replica.refuses = False
        await replica.report("SERVING")
        async with asyncio.timeout(20):
            while await asked(channel, replicas, "clip") != [calls // CALLS for calls in home]:
                pass


async def test_a_replica_that_serves_and_refuses_does_not_fail_the_calls_about_its_media(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # gRPC hashes the addresses, so a key finds the same replica in every run: see `retries` for what chance would do.
    monkeypatch.chdir(tmp_path)
    replicas = [Replica(f"unix:{name}") for name in "ab"]
    keys = [f"clip {number}" for number in range(CALLS)]
    async with (
        running(*replicas),
        open_channel(",".join(each.address for each in replicas), by_media=True) as channel,
    ):
        homes = [await asked(channel, replicas, key) for key in keys]
        replicas[0].refuses = True
        for key, home in zip(keys, homes, strict=True):
            refusals, answers = await asked(channel, replicas, key)
            assert answers == 1
            assert (refusals > 0) == (home == [1, 0])
        replicas[1].refuses = True
        with pytest.raises(Unavailable):
            await asked(channel, replicas, "clip")


async def test_a_lost_replica_does_not_fail_the_calls_about_its_media(tmp_path: Path) -> None:
    replicas = [Replica(f"unix:{tmp_path}/{name}") for name in "ab"]
    keys = [f"clip {number}" for number in range(5 * CALLS)]
    async with (
        running(replicas[0]),
        open_channel(",".join(each.address for each in replicas), by_media=True) as channel,
    ):
        async with running(replicas[1]):
            assert all(await asked(channel, replicas, *keys))
        assert await asked(channel, replicas, *keys) == [len(keys), 0]


async def test_retries_are_limited_in_number_and_by_a_budget(sockets: tuple[str, str]) -> None:
    replica = Replica(sockets[0], refuses=True)
    async with running(replica), open_channel(sockets[0]) as channel:

        async def refused() -> None:
            with pytest.raises(Unavailable):
                await ask(channel)

        await refused()
        assert replica.calls == ATTEMPTS
        await asyncio.gather(*(refused() for _ in range(BURST)))
        replica.calls = 0
        for _ in range(CALLS):
            await refused()
        assert replica.calls == CALLS
