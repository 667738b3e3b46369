"""What SIGTERM and SIGINT do to a service, what its callers are told, and its exit status.

A single preprocessing service, which starts quickly, and the fleet with requests in every stage.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gridsieve.client.client import GridsieveClient
from gridsieve.client.messages import generate_request
from gridsieve.client.prompt import user_turn
from gridsieve.common.channels import upstream_errors
from gridsieve.common.contract import errors
from gridsieve.common.process import ExitStatus
from gridsieve.v1 import preprocessing_pb2, preprocessing_pb2_grpc
from tests.awake import SOON_S, within
from tests.integration.conftest import DRAIN_S, SHORT_DRAIN_S
from tests.integration.fleet import Fleet, Service, at_rest, stopped_workers, until
from tests.integration.load import asked_about, one_in_each_stage, short_clip
from tests.processes import children, runs

# Stages that a request cannot finish while generation drains.
ENDLESS = ("in transfer", "fetching", "generating")
SOFT_LIMIT, WORKERS_LIMIT = 200, 32
# Runs preprocessing with these limits of open files.
LIMITED = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, {limits})
runpy.run_module("gridsieve.services.preprocessing", run_name="__main__", alter_sys=True)
"""

Start = Callable[..., Service]


@pytest.fixture
def start(tiny_checkpoint: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts preprocessing with these flags and one worker that decodes."""
    started: list[Service] = []

    def one(*flags: str, program: str | None = None) -> Service:
        flags = ("--decode-workers", "1", *flags)
        service = Service("preprocessing", tiny_checkpoint, tmp_path, flags, program=program)
        started.append(service)
        service.start()
        return service

    yield one
    for each in started:
        each.close()


async def test_a_service_limits_its_open_files_and_ends_with_0_without_requests(start: Start) -> None:
    """A service may open as many files as the system allows, a worker only what it needs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    service = start(program=LIMITED.format(limits=(SOFT_LIMIT, hard)))
    service.ready()
    workers = children(service.pid)
    assert resource.prlimit(service.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    assert [resource.prlimit(each, resource.RLIMIT_NOFILE) for each in workers] == [(WORKERS_LIMIT, WORKERS_LIMIT)] * 3
    service.tell(signal.SIGTERM)
    assert await asyncio.to_thread(service.ended) == ExitStatus.FINISHED
    assert not any(map(runs, workers))


async def held_calls(service: Service, channel: grpc.aio.Channel, number: int) -> list[Any]:
    """Calls that get no answer while the workers that would read their media are stopped."""
    prompt = generate_request([user_turn(short_clip(0), "What moves?")], {}).prompt
    calls = [preprocessing_pb2_grpc.PreprocessingServiceStub(channel).Preprocess() for _ in range(number)]
    for call in calls:
        await call.write(preprocessing_pb2.PreprocessRequest(prompt=prompt))
    await until(lambda: service.metric("gridsieve_preprocessing_jobs", pool="read") == number)
    return calls


async def test_a_second_signal_ends_a_service_at_once(start: Start) -> None:
    service = start("--drain-s", "100")
    service.ready()
    workers = children(service.pid)
    with stopped_workers(service):
        async with grpc.aio.insecure_channel(service.address) as channel:  # those of the product retry
            (call,) = await held_calls(service, channel, 1)
            service.tell(signal.SIGTERM)
            await until(lambda: not service.serving())
            service.tell(signal.SIGINT)
            assert await asyncio.to_thread(service.ended) == 128 + signal.SIGINT
            with pytest.raises(errors.Unavailable, match="cannot be reached"), upstream_errors("preprocessing"):
                await call.read()
            await until(lambda: not any(map(runs, workers)))


async def test_a_service_whose_workers_cannot_start_is_unhealthy_until_they_can(start: Start) -> None:
    service = start()
    service.ready()
    async with grpc.aio.insecure_channel(service.address) as channel:

        async def becomes(status: int) -> None:
            health = health_pb2_grpc.HealthStub(channel)
            async with asyncio.timeout(20):
                while (await health.Check(health_pb2.HealthCheckRequest())).status != status:
                    await asyncio.sleep(0.05)

        with stopped_workers(service):
            calls = await held_calls(service, channel, 2)
            limits = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (3, limits[1]))  # it can open nothing more
            for each in children(service.pid):
                os.kill(each, signal.SIGKILL)
            await becomes(health_pb2.HealthCheckResponse.NOT_SERVING)
            resource.prlimit(service.pid, resource.RLIMIT_NOFILE, limits)
            await becomes(health_pb2.HealthCheckResponse.SERVING)
            assert len(calls) == 2  # which last until here


# --- the fleet ----------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.parametrize("name", ["encoder", "preprocessing"])
async def test_new_requests_avoid_a_draining_replica_and_fail_once_the_last_one_drains(fleet: Fleet, name: str) -> None:
    """Both replicas get SIGTERM, one after the other, while requests wait; the second has a short grace period."""
    first, second = getattr(fleet, name)
    # Clips of its own: of those that were asked about before, preprocessing and generation have all in their caches.
    clips = map(short_clip, count(3000 if name == "encoder" else 4000))
    await asyncio.to_thread(fleet.start, first, second)
    readers = [each for each in fleet.preprocessing if each.running]
    held_by_first, held_by_second = (partial(each.metric, "gridsieve_requests_running") for each in (first, second))
    async with GridsieveClient(fleet.generation.address) as client:
        for clip in clips:  # channels look for replicas every second
            await client.ask(clip, "What moves?", max_new_tokens=1, timeout_s=30)
            if await asyncio.to_thread(second.metric, "gridsieve_requests_total", code="OK"):
                break
        with stopped_workers(*readers):
            held = [asked_about(client, clip) for clip in islice(clips, 4)]
            await until(lambda: min(held_by_first(), held_by_second()) and held_by_first() + held_by_second() == 4)
            before = held_by_second()
            first.tell(signal.SIGTERM)
            await until(lambda: not first.serving(), within_s=SOON_S)
            held += [asked_about(client, clip) for clip in islice(clips, 2)]
            await until(lambda: held_by_second() == before + 2)
        for asked in held:
            await asyncio.wait_for(asked.task, 30)
            assert (asked.failed, asked.tokens) == (None, 4)
        assert await asyncio.to_thread(first.ended) == ExitStatus.FINISHED

        with stopped_workers(*(each for each in readers if each.running)):
            held = [asked_about(client, clip) for clip in islice(clips, 2)]
            await until(lambda: held_by_second() == 2)
            signalled_s = time.monotonic()
            second.tell(signal.SIGTERM)
            await until(lambda: not second.serving(), within_s=SOON_S)
            late = asked_about(client, next(clips))
            await within(SOON_S, late.task)
            for asked in held:
                await within(SHORT_DRAIN_S + SOON_S, asked.task)
                assert asked.ended_s - signalled_s >= SHORT_DRAIN_S
            for asked in (late, *held):
                assert isinstance(asked.failed, errors.Unavailable)
                assert asked.failed.stage == name
            assert await asyncio.to_thread(second.ended) == ExitStatus.CUT_OFF
    await at_rest([each for each in fleet.first if each is not first], within_s=SOON_S)


@pytest.mark.deep
async def test_a_draining_generation_finishes_what_it_can_and_fails_the_rest(
    fleet: Fleet, fleet_client: GridsieveClient
) -> None:
    async with one_in_each_stage(fleet, fleet_client, seed=30) as load:
        load.resume()
        signalled_s = time.monotonic()
        fleet.generation.tell(signal.SIGTERM)
        for asked in load.asked.values():
            await within(DRAIN_S + SOON_S, asked.task)
        for stage, asked in load.asked.items():
            if asked.failed is None:
                assert stage not in ENDLESS
                continue
            assert isinstance(asked.failed, errors.Unavailable), stage
            assert asked.failed.stage == "generation"
            # The client retries a call that has had no event yet, and may then find no service.
            assert not asked.events or str(asked.failed) == "generation is draining, and its grace period is over"
            assert asked.ended_s - signalled_s >= DRAIN_S
        assert await asyncio.to_thread(fleet.generation.ended) == ExitStatus.CUT_OFF
        await at_rest(fleet.first[:2], within_s=SOON_S)
