"""Serves generation: `python -m gridsieve.services.generation --model DIR --preprocessing ADDR --encoder ADDR`."""

from __future__ import annotations

from gridsieve.services.compute.prepare import prepare

prepare()  # before the imports below, of which torch reads the environment once

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import structlog
import torch

from gridsieve.common.address import is_local
from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.channels import Reach, open_channel
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.retention import usual_method
from gridsieve.common.handover import receiver_of
from gridsieve.common.process import ExitStatus, leave_cores_to_others
from gridsieve.common.serving.guards import check_ports, upstream_credentials
from gridsieve.common.serving.health import READY
from gridsieve.common.serving.server import StepWatch, run, serve
from gridsieve.common.telemetry.logs import configure_logging
from gridsieve.common.telemetry.metrics import begin, begin_method, served_names
from gridsieve.families import family_of
from gridsieve.services.compute.device import device_of, name_of
from gridsieve.services.generation.engine.engine import Engine
from gridsieve.services.generation.engine.payoff import Payoff
from gridsieve.services.generation.engine.speculation import PromptLookup, Room
from gridsieve.services.generation.loading import check_ranks
from gridsieve.services.generation.memory.blocks import BlockAllocator
from gridsieve.services.generation.memory.state_slots import StateSlots
from gridsieve.services.generation.model.states import RESERVED
from gridsieve.services.generation.parallel.group import WorkerRanks
from gridsieve.services.generation.rpc.metrics import count_step, watch
from gridsieve.services.generation.rpc.servicer import SERVICE, GenerationServicer
from gridsieve.services.generation.sampling.answer_reader import MARKS
from gridsieve.services.generation.sampling.defaults import sampling_defaults
from gridsieve.services.generation.sampling.detokenizer import load_tokenizer
from gridsieve.services.generation.served_model import LiveModel, ServedModel
from gridsieve.services.generation.settings import GenerationSettings, check_pruning
from gridsieve.services.generation.startup.build import BLOCK_TOKENS, build
from gridsieve.services.generation.upstream.media import MediaClient
from gridsieve.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server

log = structlog.get_logger()


async def main() -> ExitStatus:
    settings = GenerationSettings.load()
    configure_logging("generation", settings.log_format, settings.log_level)
    check_ports(settings)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    credentials = upstream_credentials(settings)
    checkpoint = Checkpoint.find(settings.model)
    family = family_of(checkpoint)
    usual = usual_method(family.methods, checkpoint.config)
    pruning = settings.pruning(checkpoint.config, usual)
    check_pruning(family, pruning)
    said = {"rate": pruning.rate, "method": pruning.method, "threshold": pruning.threshold}
    log.info("pruning where a request names none", **said)
    defaults, tokenizer = sampling_defaults(checkpoint), load_tokenizer(checkpoint.folder, MARKS)
    broken = asyncio.Event()
    break_off = partial(asyncio.get_running_loop().call_soon_threadsafe, broken.set)
    with ExitStack() as ends:
        workers = _start_workers(settings, checkpoint, ends, broken)
        built = build(settings, checkpoint, workers.group if workers else None, workers)
        model = built.runner.model
        names = served_names(checkpoint, settings.served_model_name)
        live = None
        if family.live and not model.reads:
            recurrent = model.states is not None
            live = LiveModel(built.live_blocks * BLOCK_TOKENS, BLOCK_TOKENS, model.context_tokens, recurrent)
        served = ServedModel.of(
            checkpoint,
            names,
            tokenizer,
            defaults,
            model,
            built.limit_tokens,
            pruning,
            family.methods,
            usual,
            live,
            family.hears(checkpoint),
        )
        engine = Engine(
            built.runner,
            BlockAllocator(built.blocks, BLOCK_TOKENS),
            built.limits.max_num_batched_tokens,
            built.limits.max_num_seqs,
            settings.max_waiting_requests,
            settings.max_draft_tokens,
            count_step,
            break_off,
            overlap=model.device.type != "cpu",
            states=StateSlots(built.state_slots, RESERVED) if built.state_slots else None,
            payoff=Payoff(Room() if model.draft else PromptLookup()) if settings.max_draft_tokens else None,
            live_blocks=built.live_blocks,
            # Enough that a place which becomes free is taken at once.
            max_yielding=built.limits.max_num_seqs * 5 // 4 + 1,
        )
        media_buffer = ByteSemaphore(settings.media_buffer_bytes)
        begin("generation", "Generate", checkpoint, settings.served_model_name, name_of(model.dtype), str(model.device))
        begin_method("ListModels")
        begin_method("Live")
        begin_method("Embed")
        begin_method("Score")
        watch(engine, media_buffer, built.limits.max_num_seqs, settings.max_waiting_requests)
        if model.device.type == "cpu":
            # Otherwise it decodes the first answers one by one while the encoder, on the same cores, still encodes the
            # videos of the next: a step with one answer reads as many weights as one with eight. The engine's thread
            # and those that it computes with inherit the priority.
            leave_cores_to_others()
        engine.start()
        ends.callback(engine.stop)
        if workers:
            workers.failure.watch(partial(_give_up, engine, break_off))
        async with (
            open_channel(settings.preprocessing, credentials) as preprocessing,
            open_channel(settings.encoder, credentials, by_media=True) as encoder,
            # Connections of their own: a call that meets one in back-off, from before its service listened, would fail.
            open_channel(settings.preprocessing, credentials, health=READY) as ready_preprocessing,
            open_channel(settings.encoder, credentials, health=READY) as ready_encoder,
        ):
            # On cores that both share, prefill takes from the tower what it gains, and is interrupted more often.
            in_parts = model.device.type != "cpu" or not is_local(settings.encoder)
            media = MediaClient(
                preprocessing,
                encoder,
                served.input,
                media_buffer,
                settings.max_inline_bytes,
                partial(receiver_of, settings.encoder),
                in_parts,
                usual,
            )
            servicer = GenerationServicer(engine, media, served, credentials, settings.media_buffer_bytes)
            step = StepWatch.of(lambda: engine.step_began_ns, settings.step_timeout_s, model.device.type)
            register = partial(add_GenerationServiceServicer_to_server, servicer)
            reach = Reach(ready_preprocessing, ready_encoder)
            status = await serve(
                SERVICE,
                settings,
                register,
                lambda: engine.alive,
                broken,
                step=step,
                reaches=reach,
                counts_callers=True,
            )
    if workers and model.device.type == "cuda":  # see `compute.group.leave`
        os._exit(status)
    return status


def _start_workers(
    settings: GenerationSettings, checkpoint: Checkpoint, ends: ExitStack, broken: asyncio.Event
) -> WorkerRanks | None:
    if settings.tensor_parallel == 1:
        return None
    check_ranks(checkpoint, settings.tensor_parallel)
    device = device_of(settings.device, "--tensor-parallel", settings.tensor_parallel)
    workers = WorkerRanks(settings.tensor_parallel, sys.argv[1:], device)
    ends.callback(_close_workers, workers, broken)
    return workers


def _close_workers(workers: WorkerRanks, broken: asyncio.Event) -> None:
    in_step = workers.failure.cause is None and not broken.is_set()
    workers.close(in_step)
    if not in_step:  # a device may wait for ever for a collective operation of a lost rank
        os._exit(ExitStatus.FAILED)


def _give_up(engine: Engine, break_off: Callable[[], object]) -> None:
    """Called in the thread that noticed the loss of a rank."""
    engine.give_up()
    break_off()


if __name__ == "__main__":
    run(main)
