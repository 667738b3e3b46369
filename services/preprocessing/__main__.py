"""Serves preprocessing: `python -m services.preprocessing --model DIR --listen ADDR --media-root DIR`."""

from __future__ import annotations

from functools import partial

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from common.process import ExitStatus
from common.serving.server import run, serve
from common.telemetry.logs import configure_logging
from common.telemetry.metrics import begin
from framesieve.v1.preprocessing_pb2_grpc import add_PreprocessingServiceServicer_to_server
from services.preprocessing.fetch.fetcher import Fetcher
from services.preprocessing.planner import Planner
from services.preprocessing.rpc.metrics import count_replaced, watch
from services.preprocessing.rpc.servicer import SERVICE, PreprocessingServicer
from services.preprocessing.rpc.threads import Threads
from services.preprocessing.settings import PreprocessingSettings
from services.preprocessing.workers.pool import Pool, started

# What they do takes milliseconds mostly; the second is for when the first has a long prompt to check.
_QUICK_THREADS = 2
_SLOW_THREADS = 4
# Media are read within milliseconds; the second is for when the first meets one that takes its time.
_READING_WORKERS = 2


async def main() -> ExitStatus:
    settings = PreprocessingSettings.load()
    configure_logging("preprocessing", settings.log_format, settings.log_level)
    if settings.media_root is not None and not settings.media_root.is_dir():
        raise StartupError(f"--media-root {settings.media_root} is no folder")
    reading = Pool(_READING_WORKERS, settings.limits, settings.inflight_bytes, count_replaced)
    decoding = Pool(settings.decode_workers, settings.limits, settings.inflight_bytes, count_replaced)
    checkpoint = Checkpoint(settings.model)
    planner = Planner(checkpoint, settings.media_root, settings.media_max_bytes)
    begin("preprocessing", "Preprocess", checkpoint)
    quick, slow = Threads(_QUICK_THREADS), Threads(_SLOW_THREADS)
    watch(reading, decoding, quick, slow)
    # Left from the right: a plan that still waits for a worker is told at once that there is none any more.
    async with quick, slow, started(reading, decoding):
        fetcher = Fetcher(settings.fetch_policy)
        servicer = PreprocessingServicer(planner, fetcher, quick, slow, reading, decoding)
        register = partial(add_PreprocessingServiceServicer_to_server, servicer)
        return await serve(SERVICE, settings, register, lambda: reading.crew.able and decoding.crew.able)


if __name__ == "__main__":
    run(main)
