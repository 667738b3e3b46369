"""The cost of a load is the increase of the services' metrics, read from real endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from gridsieve.bench.metrics import read_metrics, spent
from gridsieve.common.contract.errors import InvalidRequest, Unavailable


@dataclass
class Replica:
    """One service's endpoint, with the metrics that are read of it."""

    service: str
    address: str = ""
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        self.build = Gauge("gridsieve_build_info", "…", ["service", "version"], registry=self.registry)
        self.build.labels(self.service, "1")
        self.busy = Histogram("gridsieve_stage_busy_seconds", "…", ["stage"], registry=self.registry)
        self.bytes = Counter("gridsieve_message_bytes", "…", ["method", "direction"], registry=self.registry)
        self.processor = Counter("process_cpu_seconds", "…", registry=self.registry)
        if self.service == "generation":
            self.step = Histogram("gridsieve_generation_step_seconds", "…", registry=self.registry)
        if self.service == "preprocessing":
            workers = Gauge("gridsieve_preprocessing_workers", "…", ["pool"], registry=self.registry)
            workers.labels("read").set(2)
            workers.labels("decode").set(3)


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    found = [Replica(service) for service in ("generation", "preprocessing", "preprocessing", "encoder")]
    servers = [start_http_server(0, "127.0.0.1", each.registry) for each in found]
    for each, (server, _) in zip(found, servers, strict=True):
        each.address = f"127.0.0.1:{server.server_port}"
    yield found
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


async def test_costs_before_the_load_do_not_count_and_replicas_are_summed(replicas: list[Replica]) -> None:
    generation, first, second, encoder = replicas
    for each in replicas:
        each.busy.labels("plan").observe(100)
        each.processor.inc(100)
    before = await read_metrics([each.address for each in replicas])
    first.busy.labels("decode").observe(1.5)  # a stage that had no series before
    second.busy.labels("decode").observe(2.5)
    second.busy.labels("plan").observe(0.25)
    generation.step.observe(0.5)
    encoder.bytes.labels("Encode", "sent").inc(900)
    encoder.bytes.labels("Encode", "received").inc(50)
    encoder.processor.inc(7)
    told = {each.service: each for each in spent(before, await read_metrics([each.address for each in replicas]))}
    assert [*told] == ["generation", "preprocessing", "encoder"]
    preprocessing = told["preprocessing"]
    assert (preprocessing.replicas, preprocessing.workers) == (2, 3)
    assert preprocessing.busy_s == {"decode": 4.0, "plan": 0.25}
    assert told["generation"].busy_s == {"plan": 0.0, "step": 0.5}
    assert (told["generation"].replicas, told["generation"].workers) == (1, 0)
    assert (told["encoder"].sent_bytes, told["encoder"].received_bytes, told["encoder"].processor_s) == (900, 50, 7)
    assert preprocessing.sent_bytes == preprocessing.received_bytes == preprocessing.processor_s == 0


async def test_an_address_without_metrics_or_of_another_program_is_named(replicas: list[Replica]) -> None:
    with pytest.raises(Unavailable, match=r"no metrics at 127\.0\.0\.1:1: "):
        await read_metrics([replicas[0].address, "127.0.0.1:1"])
    encoder = replicas[3]
    encoder.registry.unregister(encoder.build)
    with pytest.raises(InvalidRequest, match=f"--metrics: {encoder.address}/metrics has no gridsieve_build_info"):
        await read_metrics([encoder.address])


async def test_a_page_that_is_not_in_prometheus_format_is_rejected() -> None:
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n<html>not {these}</html>")
        writer.close()

    async with await asyncio.start_server(page, "127.0.0.1", 0) as server:
        _, port = server.sockets[0].getsockname()
        with pytest.raises(InvalidRequest, match="is not in Prometheus' text format"):
            await read_metrics([f"127.0.0.1:{port}"])
