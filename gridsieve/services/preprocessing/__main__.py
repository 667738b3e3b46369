"""Serves preprocessing: `python -m gridsieve.services.preprocessing --model DIR --listen ADDR --media-root DIR`."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import structlog

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.process import ExitStatus, cores, memory_bytes
from gridsieve.common.serving.guards import check_ports
from gridsieve.common.serving.server import run, serve
from gridsieve.common.telemetry.logs import configure_logging
from gridsieve.common.telemetry.metrics import begin, begin_method
from gridsieve.services.preprocessing.fetch.fetcher import Fetcher
from gridsieve.services.preprocessing.fetch.login import logins_of
from gridsieve.services.preprocessing.planner import Planner
from gridsieve.services.preprocessing.rpc.metrics import FETCHED_BYTES, count_kept, count_replaced, watch
from gridsieve.services.preprocessing.rpc.planning_threads import PlanningThreads
from gridsieve.services.preprocessing.rpc.servicer import SERVICE, PreprocessingServicer
from gridsieve.services.preprocessing.settings import PreprocessingSettings
from gridsieve.services.preprocessing.sources.digests import digests
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from gridsieve.services.preprocessing.workers.limits import Mechanism
from gridsieve.services.preprocessing.workers.media_reader import indexes
from gridsieve.services.preprocessing.workers.stream_room import StreamRoom
from gridsieve.services.preprocessing.workers.streams import StreamWorkers
from gridsieve.v1.preprocessing_pb2_grpc import add_PreprocessingServiceServicer_to_server

# Quick plans mostly take milliseconds; the second thread serves them while the first checks a long prompt.
_QUICK_THREADS = 2
_WORKERS = {
    "cpu": "gridsieve.services.preprocessing.workers.worker",
    "nvdec": "gridsieve.services.preprocessing.workers.card_worker",
}

log = structlog.get_logger()


async def main() -> ExitStatus:
    settings = PreprocessingSettings.load()
    configure_logging("preprocessing", settings.log_format, settings.log_level)
    check_ports(settings)
    for flag, root in (("--media-root", settings.media_root), ("--upload-root", settings.upload_root)):
        if root is not None and not root.is_dir():
            raise StartupError(f"{flag} {root} is not a folder")
    reading = JobQueue(max(2, settings.decode_workers // 2), settings.limits, settings.inflight_bytes, count_replaced)
    decoding = JobQueue(
        *(settings.decode_workers, settings.limits, settings.inflight_bytes, count_replaced),
        entry=_WORKERS[settings.decoder],
    )
    if settings.max_streams is None:
        room = StreamRoom.of(cores(), memory_bytes(), settings.max_requests)
    else:
        room = StreamRoom(settings.max_streams)
    log.info("streams that may be watched", most=room.most, why=room.why, cores=room.cores)
    streams = StreamWorkers(room, settings.limits, count_replaced)
    checkpoint = Checkpoint.find(settings.model)
    known = digests(count_kept("digest"))
    planner = Planner(checkpoint, settings.media_root, settings.media_max_bytes, known, settings.upload_root)
    begin("preprocessing", "Preprocess", checkpoint, settings.served_model_name)
    begin_method("Watch")
    quick, slow = PlanningThreads(_QUICK_THREADS), PlanningThreads(max(4, settings.decode_workers))
    watch(reading, decoding, quick, slow)
    # Exited from the right: the queues end first, so plans that wait for a worker fail before the threads are joined.
    async with quick, slow, reading, decoding:
        confined_by = reading.workers.confined_by & decoding.workers.confined_by
        check_sandbox(confined_by, settings.require_sandbox)
        logins = logins_of(settings.media_credentials_file)
        fetcher = Fetcher(settings.fetch_policy, logins=logins, on_bytes=FETCHED_BYTES.inc, on_get=count_kept("fetch"))
        with closing(fetcher):
            servicer = PreprocessingServicer(
                *(planner, fetcher, quick, slow, reading, decoding, streams, settings.max_inline_bytes),
                known=indexes(count_kept("index")),
                held_bytes=settings.inflight_bytes,
            )
            register = partial(add_PreprocessingServiceServicer_to_server, servicer)
            return await serve(
                *(SERVICE, settings, register, lambda: reading.workers.healthy and decoding.workers.healthy),
                details={"gridsieve-workers-confined-by": ",".join(sorted(confined_by)) or "nothing"},
            )


def check_sandbox(confined_by: frozenset[str], required: bool) -> None:
    """Logs what the kernel does not confine workers by. Raises StartupError for anything where all is required."""
    missing = [each for each in Mechanism if each not in confined_by]
    if not missing:
        log.info("workers confined", by=sorted(confined_by))
        return
    if required:
        raise StartupError(f"--require-sandbox: this kernel does not confine workers by {' and '.join(missing)}")
    log.warning("workers are confined less than they could be", by=sorted(confined_by), missing=missing)


if __name__ == "__main__":
    run(main)
