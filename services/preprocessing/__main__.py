"""Serves preprocessing: `python -m services.preprocessing --model DIR --listen ADDR --media-root DIR`."""

from __future__ import annotations

from functools import partial

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from common.process import ExitStatus
from common.serving.guards import check_ports
from common.serving.server import run, serve
from common.telemetry.logs import configure_logging
from common.telemetry.metrics import begin
from framesieve.v1.preprocessing_pb2_grpc import add_PreprocessingServiceServicer_to_server
from services.preprocessing.fetch.fetcher import Fetcher
from services.preprocessing.planner import Planner
from services.preprocessing.rpc.metrics import count_replaced, watch
from services.preprocessing.rpc.planning_threads import PlanningThreads
from services.preprocessing.rpc.servicer import SERVICE, PreprocessingServicer
from services.preprocessing.settings import PreprocessingSettings
from services.preprocessing.workers.job_queue import JobQueue, started

# Quick plans mostly take milliseconds; the second thread serves them while the first checks a long prompt.
_QUICK_THREADS = 2
_SLOW_THREADS = 4
# Reading media mostly takes milliseconds; the second worker serves others while the first reads a slow one.
_READING_WORKERS = 2


async def main() -> ExitStatus:
    settings = PreprocessingSettings.load()
    configure_logging("preprocessing", settings.log_format, settings.log_level)
    check_ports(settings)
    if settings.media_root is not None and not settings.media_root.is_dir():
        raise StartupError(f"--media-root {settings.media_root} is not a folder")
    reading = JobQueue(_READING_WORKERS, settings.limits, settings.inflight_bytes, count_replaced)
    decoding = JobQueue(settings.decode_workers, settings.limits, settings.inflight_bytes, count_replaced)
    checkpoint = Checkpoint.find(settings.model)
    planner = Planner(checkpoint, settings.media_root, settings.media_max_bytes)
    begin("preprocessing", "Preprocess", checkpoint, settings.served_model_name)
    quick, slow = PlanningThreads(_QUICK_THREADS), PlanningThreads(_SLOW_THREADS)
    watch(reading, decoding, quick, slow)
    # Exited from the right: the queues end first, so plans that wait for a worker fail before the threads are joined.
    async with quick, slow, started(reading, decoding):
        fetcher = Fetcher(settings.fetch_policy)
        servicer = PreprocessingServicer(planner, fetcher, quick, slow, reading, decoding, settings.max_inline_bytes)
        register = partial(add_PreprocessingServiceServicer_to_server, servicer)
        return await serve(SERVICE, settings, register, lambda: reading.workers.healthy and decoding.workers.healthy)


if __name__ == "__main__":
    run(main)
