"""What a signal does to a service's process, what its callers are told, and what it ends with.

Of preprocessing, which starts in no time; of generation where requests are in every stage.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.channels import upstream_errors
from common.contract import errors
from common.process import ExitStatus
from framesieve.client.client import FramesieveClient
from framesieve.v1 import preprocessing_pb2, preprocessing_pb2_grpc, prompt_pb2
from tests import media
from tests.awake import SOON_S, within
from tests.integration.conftest import DRAIN_S, HASTY_DRAIN_S
from tests.integration.fleet import Fleet, Service, at_rest, children, runs, stopped_workers, until
from tests.integration.load import Load, asked_about, short_clip

ENDLESS = ("in transfer", "fetching", "generating")

Start = Callable[..., Service]


@pytest.fixture
def start(checkpoint: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[Service] = []

    def one(*flags: str) -> Service:
        service = Service("preprocessing", checkpoint, tmp_path, ("--decode-workers", "1", *flags))
        started.append(service)
        service.start()
        return service

    yield one
    for each in started:
        each.close()


@asynccontextmanager
async def held_call(service: Service, held: int = 1) -> AsyncIterator[Any]:
    """A call that gets no answer, of so many: the workers that would read its media stand still.

    By a bare channel: one of ours would begin it again.
    """
    video = prompt_pb2.Part(video=prompt_pb2.Media(data=media.clip()))
    message = prompt_pb2.Message(role=prompt_pb2.ROLE_USER, parts=[video])
    with stopped_workers(service):
        async with grpc.aio.insecure_channel(service.address) as channel:
            call = preprocessing_pb2_grpc.PreprocessingServiceStub(channel).Preprocess()
            await call.write(preprocessing_pb2.PreprocessRequest(prompt=prompt_pb2.Prompt(messages=[message])))
            await until(lambda: service.metric("framesieve_preprocessing_jobs", pool="read") == held)
            yield call


async def test_a_service_without_requests_ends_with_0_and_leaves_no_worker(start: Start) -> None:
    service = start()
    service.ready()
    workers = children(service.pid)
    service.tell(signal.SIGTERM)
    assert service.ended() == 0
    assert not any(map(runs, workers))


async def test_whoever_outlasts_the_grace_is_told_so_and_the_status_is_3(start: Start) -> None:
    service = start("--drain-s", "1")
    service.ready()
    async with held_call(service) as call:
        service.tell(signal.SIGTERM)
        await until(lambda: not service.serving(), within_s=1)
        with pytest.raises(errors.Unavailable, match="preprocessing is draining") as told, upstream_errors("a proxy"):
            await call.read()
        assert told.value.stage == "preprocessing"
        assert await asyncio.to_thread(service.ended) == 3


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
async def test_a_second_signal_ends_it_at_once(start: Start, second: signal.Signals) -> None:
    service = start("--drain-s", "100")
    service.ready()
    async with held_call(service) as call:
        workers = children(service.pid)
        service.tell(signal.SIGTERM)
        await until(lambda: not service.serving())
        service.tell(second)
        assert await asyncio.to_thread(service.ended) == 128 + second
        with pytest.raises(errors.Unavailable, match="cannot be reached"), upstream_errors("preprocessing"):
            await call.read()
        await until(lambda: not any(map(runs, workers)))


async def test_a_service_that_is_not_ready_ends_at_once(start: Start) -> None:
    service = start()
    await until(lambda: children(service.pid))
    service.tell(signal.SIGTERM)
    assert await asyncio.to_thread(service.ended) == 128 + signal.SIGTERM


async def test_what_cannot_start_ends_with_2(start: Start) -> None:
    service = start("--media-root", "/nowhere")
    assert await asyncio.to_thread(service.ended) == 2
    last = json.loads(service.log().splitlines()[-1])
    assert re.match(r"\d{4}-\d\d-\d\dT", last.pop("timestamp"))
    told = {"event": "cannot start", "level": "error", "service": "preprocessing"}
    assert last == {**told, "error": "--media-root /nowhere is not a folder"}


async def test_a_service_whose_workers_do_not_start_is_unwell_until_they_do(start: Start) -> None:
    service = start()
    service.ready()
    async with grpc.aio.insecure_channel(service.address) as prober:
        health = health_pb2_grpc.HealthStub(prober)

        async def becomes(status: str) -> None:
            wanted = health_pb2.HealthCheckResponse.ServingStatus.Value(status)
            async with asyncio.timeout(20):
                while (await health.Check(health_pb2.HealthCheckRequest())).status != wanted:
                    await asyncio.sleep(0.05)

        await becomes("SERVING")
        async with held_call(service), held_call(service, held=2):
            limits = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (3, limits[1]))  # none is to be had but what is open
            for each in children(service.pid):
                os.kill(each, signal.SIGKILL)
            await becomes("NOT_SERVING")
            resource.prlimit(service.pid, resource.RLIMIT_NOFILE, limits)
            await becomes("SERVING")


async def shared_with(replica: Service, client: FramesieveClient) -> None:
    """Returns once whoever asks it has found it: channels look again within a second."""
    for seed in count(3100):
        asked = asked_about(client, short_clip(seed))
        await asyncio.wait_for(asked.task, 30)
        assert asked.failed is None
        if await asyncio.to_thread(replica.metric, "framesieve_requests_total", code="OK"):
            return


@pytest.mark.parametrize("name", ["encoder", "preprocessing"])
async def test_a_replica_passes_new_requests_on_to_the_other_which_is_alone_and_refuses_them(
    fleet: Fleet, name: str
) -> None:
    """Both are told to stop, one after the other, with requests that cannot go on; the second is in a hurry."""
    first, second = getattr(fleet, name)
    await asyncio.to_thread(fleet.start, first, second)
    readers = [each for each in fleet.preprocessing if each.running]
    held_by_first, held_by_second = (partial(each.metric, "framesieve_requests_running") for each in (first, second))
    async with FramesieveClient(fleet.generation.address) as client:
        await shared_with(second, client)
        with stopped_workers(*readers):
            held = [asked_about(client, short_clip(seed)) for seed in range(3000, 3004)]
            await until(lambda: held_by_first() == held_by_second() == 2)
            first.tell(signal.SIGTERM)
            await until(lambda: not first.serving(), within_s=SOON_S)
            held += [asked_about(client, short_clip(seed)) for seed in range(3004, 3006)]
            await until(lambda: held_by_second() == 4)
        for asked in held:
            await asyncio.wait_for(asked.task, 30)
            assert (asked.failed, asked.tokens) == (None, 4)
        assert await asyncio.to_thread(first.ended) == ExitStatus.FINISHED

        with stopped_workers(*(each for each in readers if each.running)):
            held = [asked_about(client, short_clip(seed)) for seed in range(3010, 3012)]
            await until(lambda: held_by_second() == 2)
            told_s = time.monotonic()
            second.tell(signal.SIGTERM)
            await until(lambda: not second.serving(), within_s=SOON_S)
            late = asked_about(client, short_clip(3012))
            await within(SOON_S, late.task)
            for asked in held:
                await within(HASTY_DRAIN_S + SOON_S, asked.task)
                assert asked.ended_s - told_s >= HASTY_DRAIN_S
            for asked in (late, *held):
                assert isinstance(asked.failed, errors.Unavailable)
                assert asked.failed.stage == name
            assert await asyncio.to_thread(second.ended) == ExitStatus.CUT_OFF
    await at_rest([each for each in fleet.first if each is not first], within_s=SOON_S)


async def test_a_generation_that_is_told_to_stop_finishes_what_it_can_and_tells_the_rest(
    fleet: Fleet,
) -> None:
    async with FramesieveClient(fleet.generation.address) as client, Load(fleet, client, seed=30) as load:
        await load.held()
        load.resume()
        told_s = time.monotonic()
        fleet.generation.tell(signal.SIGTERM)
        for asked in load.asked.values():
            await within(DRAIN_S + SOON_S, asked.task)
        for stage, asked in load.asked.items():
            if asked.failed is None:
                assert stage not in ENDLESS
                continue
            assert isinstance(asked.failed, errors.Unavailable), stage
            assert asked.failed.stage == "generation"
            # What nothing was said to yet is asked again, and then nobody may be there.
            assert not asked.events or str(asked.failed) == "generation is draining, and the time to finish is over"
            assert asked.ended_s - told_s >= DRAIN_S
        assert load.asked["prefilling"].failed is None
        assert await asyncio.to_thread(fleet.generation.ended) == ExitStatus.CUT_OFF
        await at_rest(fleet.first[:2], within_s=SOON_S)
