"""Serves preprocessing: `python -m services.preprocessing --model DIR --listen ADDR --media-root DIR`."""

from __future__ import annotations

import os
from functools import partial

from common.checkpoint import Checkpoint
from common.errors import StartupError
from common.server import run, serve
from common.telemetry import configure_logging
from framesieve.v1.preprocessing_pb2_grpc import add_PreprocessingServiceServicer_to_server
from services.preprocessing.fetch.fetcher import Fetcher
from services.preprocessing.planner import Planner
from services.preprocessing.servicer import SERVICE, PreprocessingServicer
from services.preprocessing.settings import PreprocessingSettings
from services.preprocessing.threads import Workers

_PLANNING_WORKERS = 4


async def main() -> None:
    settings = PreprocessingSettings.load()
    configure_logging("preprocessing", settings.log_format)
    if settings.media_root is not None and not settings.media_root.is_dir():
        raise StartupError(f"--media-root {settings.media_root} is no folder")
    planner = Planner(Checkpoint(settings.model), settings.media_root)
    planning, decoding = Workers(_PLANNING_WORKERS), Workers(os.cpu_count() or 1)
    servicer = PreprocessingServicer(planner, Fetcher(settings.fetch_policy), planning, decoding)
    try:
        await serve(SERVICE, settings, partial(add_PreprocessingServiceServicer_to_server, servicer))
    finally:
        planning.shut_down()
        decoding.shut_down()


if __name__ == "__main__":
    run(main)
