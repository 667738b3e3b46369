"""Serves the encoder: `python -m services.encoder --model DIR --listen ADDR --preprocessing ADDR`."""

from __future__ import annotations

import asyncio
import os
from functools import partial

from common.byte_semaphore import ByteSemaphore
from common.channels import open_channel
from common.checkpoint import Checkpoint
from common.process import ExitStatus
from common.security.credentials import Credentials
from common.serving.guards import upstream_credentials
from common.serving.server import run, serve
from common.telemetry.logs import configure_logging
from common.telemetry.metrics import begin
from framesieve.v1.encoder_pb2_grpc import add_EncoderServiceServicer_to_server
from services.encoder.items.batcher import Batcher
from services.encoder.items.cache import EmbedsCache
from services.encoder.rpc.gauges import watch
from services.encoder.rpc.servicer import SERVICE, EncoderServicer
from services.encoder.settings import EncoderSettings
from services.encoder.startup.data_parallel import data_parallel
from services.encoder.tower.parallel.tower import DataParallelTower


async def main() -> ExitStatus:
    settings = EncoderSettings.load()
    configure_logging("encoder", settings.log_format, settings.log_level)
    credentials = upstream_credentials(settings)
    checkpoint = Checkpoint(settings.model)
    with data_parallel(settings) as towers:
        status = await _serve(settings, credentials, checkpoint, towers)
    if towers.loss.lost is not None:  # threads may wait for ever for what it was to send
        os._exit(status)
    if settings.data_parallel > 1 and towers.own.device.type == "cuda":  # see `exchange.leave`
        os._exit(status)
    return status


async def _serve(
    settings: EncoderSettings, credentials: Credentials, checkpoint: Checkpoint, towers: DataParallelTower
) -> ExitStatus:
    tower, broken = towers.own, asyncio.Event()
    batcher = Batcher(towers.encode, towers.budget_tokens, towers.packing)
    towers.loss.watch(partial(_end, towers, batcher, broken, asyncio.get_running_loop()))
    cache = EmbedsCache(tower, batcher, ByteSemaphore(settings.output_buffer_bytes), settings.cache_bytes)
    outputs = ByteSemaphore(settings.output_buffer_bytes)
    begin("encoder", "Encode", checkpoint, str(tower.dtype).removeprefix("torch."), str(tower.device))
    watch(batcher, cache, outputs)
    try:
        async with open_channel(settings.preprocessing, credentials) as channel:
            servicer = EncoderServicer(checkpoint.fingerprint, cache, outputs, channel, credentials)
            register = partial(add_EncoderServiceServicer_to_server, servicer)
            return await serve(SERVICE, settings, register, lambda: batcher.alive, broken)
    finally:
        if towers.loss.lost is None:
            batcher.close()


def _end(towers: DataParallelTower, batcher: Batcher, broken: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    """From another thread."""
    batcher.give_up(towers.loss.error)
    loop.call_soon_threadsafe(broken.set)


if __name__ == "__main__":
    run(main)
