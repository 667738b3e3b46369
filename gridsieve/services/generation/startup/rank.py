"""Worker process of tensor parallelism: executes the steps that rank 0 sends until rank 0 closes the connection.

`python -m gridsieve.services.generation.startup.rank DESCRIPTOR`, started by the service only.
"""

from __future__ import annotations

from gridsieve.services.compute.prepare import prepare

prepare()  # before the imports below, of which torch reads the environment once

import os
import sys
from itertools import cycle
from pathlib import Path

import structlog
import torch

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.process import ExitStatus
from gridsieve.common.ranks import Orders
from gridsieve.common.telemetry.logs import configure_logging
from gridsieve.services.compute.device import device_of
from gridsieve.services.generation.model.runner import Runner
from gridsieve.services.generation.parallel.group import Group, from_bytes
from gridsieve.services.generation.settings import GenerationSettings
from gridsieve.services.generation.startup.build import build

log = structlog.get_logger()


def main() -> None:
    orders = Orders(int(sys.argv[1]))
    if not orders.facts:  # the service has ended meanwhile
        return
    rank = orders.facts["rank"]
    structlog.contextvars.bind_contextvars(rank=rank)
    try:
        settings = GenerationSettings.load(orders.facts["arguments"])
        configure_logging("generation", settings.log_format, settings.log_level)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        device = device_of(settings.device, "--tensor-parallel", settings.tensor_parallel, rank)
        group = Group(rank, orders.facts["ranks"], Path(orders.facts["meeting"]), device)
        run_steps(orders, build(settings, Checkpoint.find(settings.model), group).runner, group)
    except StartupError as error:
        log.error("cannot start", error=str(error))
        sys.exit(ExitStatus.CANNOT_START)
    os._exit(ExitStatus.FINISHED)  # see `compute.group.leave`


def run_steps(orders: Orders, runner: Runner, group: Group) -> None:
    """Executes steps until rank 0 closes the connection or sends an empty message."""
    model = runner.model
    # Pinned rows of graphs are written again two steps later.
    computed = cycle([torch.cuda.Event(), torch.cuda.Event()]) if model.device.type == "cuda" else None
    while data := orders.receive():
        packed = from_bytes(data)
        media_embeds = None
        if media := packed.media_rows.size:
            shape = (1 + model.embed_levels, media, model.hidden_size)
            media_embeds = group.from_first(torch.empty(shape, dtype=model.dtype, device=model.device))
        unread = None
        if rows := packed.unread_rows.size:
            unread = group.from_first(torch.empty(rows, dtype=torch.int64, device=model.device))
        done = next(computed) if computed else None
        if done:
            done.synchronize()
        runner.compute(packed, media_embeds, unread)
        if done:
            done.record()


if __name__ == "__main__":
    main()
