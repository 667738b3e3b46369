"""Serves the encoder: `python -m services.encoder --model DIR --listen ADDR --preprocessing ADDR`."""

from __future__ import annotations

from functools import partial

import torch

from common.channels import open_channel
from common.checkpoint import Checkpoint
from common.errors import StartupError
from common.exit_status import ExitStatus
from common.guards import upstream_credentials
from common.logs import configure_logging
from common.metrics import begin
from common.room import Room
from common.server import run, serve
from framesieve.v1.encoder_pb2_grpc import add_EncoderServiceServicer_to_server
from services.encoder.batcher import Batcher
from services.encoder.cache import EmbedsCache
from services.encoder.families import load_tower
from services.encoder.graphs import with_graphs
from services.encoder.metrics import watch
from services.encoder.servicer import SERVICE, EncoderServicer
from services.encoder.settings import EncoderSettings


async def main() -> ExitStatus:
    settings = EncoderSettings.load()
    configure_logging("encoder", settings.log_format, settings.log_level)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    credentials = upstream_credentials(settings)
    checkpoint = Checkpoint(settings.model)
    tower = load_tower(checkpoint, settings.dtype, _device(settings.device), settings.tower_attention)
    tower = with_graphs(tower, settings.batch_tokens)
    batcher = Batcher(tower.encode, settings.batch_tokens, tower.packing)
    cache = EmbedsCache(tower, batcher, Room(settings.output_buffer_bytes), settings.cache_bytes)
    outputs = Room(settings.output_buffer_bytes)
    begin("encoder", "Encode", checkpoint, str(tower.dtype).removeprefix("torch."), str(tower.device))
    watch(batcher, cache, outputs)
    try:
        async with open_channel(settings.preprocessing, credentials) as channel:
            servicer = EncoderServicer(checkpoint.fingerprint, cache, outputs, channel, credentials)
            register = partial(add_EncoderServiceServicer_to_server, servicer)
            return await serve(SERVICE, settings, register, lambda: batcher.alive)
    finally:
        batcher.close()


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter from builds of torch without CUDA
        raise StartupError(f"--device {name} cannot be used: {error}") from error
    return device


if __name__ == "__main__":
    run(main)
