"""Runs the encoder service: `python -m gridsieve.services.encoder --model DIR --listen ADDR --preprocessing ADDR`."""

from __future__ import annotations

from gridsieve.services.compute.prepare import prepare

prepare()  # before the imports below, of which torch reads the environment once

import asyncio
import os
from collections.abc import Callable
from functools import partial

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.channels import open_channel
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.handover import receiver_of
from gridsieve.common.process import ExitStatus
from gridsieve.common.security.credentials import Credentials
from gridsieve.common.serving.guards import check_ports, upstream_credentials
from gridsieve.common.serving.server import StepWatch, run, serve
from gridsieve.common.telemetry.logs import configure_logging
from gridsieve.common.telemetry.metrics import begin
from gridsieve.services.compute.device import name_of
from gridsieve.services.encoder.items.batcher import Batcher
from gridsieve.services.encoder.items.cache import EmbedsCache
from gridsieve.services.encoder.rpc.gauges import watch
from gridsieve.services.encoder.rpc.servicer import SERVICE, EncoderServicer
from gridsieve.services.encoder.settings import EncoderSettings
from gridsieve.services.encoder.startup.build import parallel_tower, ranks_of
from gridsieve.services.encoder.tower.parallel.tower import ParallelTower
from gridsieve.v1.encoder_pb2_grpc import add_EncoderServiceServicer_to_server


async def main() -> ExitStatus:
    settings = EncoderSettings.load()
    configure_logging("encoder", settings.log_format, settings.log_level)
    check_ports(settings)
    credentials = upstream_credentials(settings)
    checkpoint = Checkpoint.find(settings.model)
    with parallel_tower(settings) as towers:
        status = await _serve(settings, credentials, checkpoint, towers)
    if towers.rank_failure.cause is not None:  # threads may wait for ever for the failed rank
        os._exit(status)
    if ranks_of(settings)[1] > 1 and towers.own.device.type == "cuda":  # see `compute.group.leave`
        os._exit(status)
    return status


async def _serve(
    settings: EncoderSettings, credentials: Credentials, checkpoint: Checkpoint, towers: ParallelTower
) -> ExitStatus:
    tower, failed = towers.own, asyncio.Event()
    end = partial(asyncio.get_running_loop().call_soon_threadsafe, failed.set)
    batcher = Batcher(towers.encode, towers.packing, end)
    towers.rank_failure.watch(partial(_abort, towers, batcher, end))
    cache = EmbedsCache(tower, batcher, ByteSemaphore(settings.output_buffer_bytes), settings.cache_bytes)
    output_bytes = ByteSemaphore(settings.output_buffer_bytes)
    begin("encoder", "Encode", checkpoint, settings.served_model_name, name_of(tower.dtype), str(tower.device))
    watch(batcher, cache, output_bytes)
    batcher.start()
    try:
        async with open_channel(settings.preprocessing, credentials) as channel:
            servicer = EncoderServicer(
                checkpoint.fingerprint,
                cache,
                output_bytes,
                channel,
                credentials,
                settings.max_inline_bytes,
                partial(receiver_of, settings.preprocessing),
            )
            register = partial(add_EncoderServiceServicer_to_server, servicer)
            step = StepWatch.of(lambda: batcher.forward_began_ns, settings.step_timeout_s, tower.device.type)
            return await serve(SERVICE, settings, register, lambda: batcher.alive, failed, step=step)
    finally:
        if towers.rank_failure.cause is None:
            batcher.close()


def _abort(towers: ParallelTower, batcher: Batcher, end: Callable[[], object]) -> None:
    """Fails all slices and ends the service; called from the thread that watches the ranks."""
    batcher.abort(towers.failure)
    end()


if __name__ == "__main__":
    run(main)
