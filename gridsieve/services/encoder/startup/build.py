"""Builds the tower of this process, and starts the other ranks, if there are any; this process is rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.ranks import Ranks, meeting_place
from gridsieve.services.compute.compiled import compile_layers
from gridsieve.services.compute.device import device_of
from gridsieve.services.compute.group import join, leave
from gridsieve.services.compute.rank_failure import RankFailure
from gridsieve.services.encoder.settings import EncoderSettings
from gridsieve.services.encoder.startup.adapters import with_adapters
from gridsieve.services.encoder.startup.largest_forward import run_largest
from gridsieve.services.encoder.tower.gelu import gelu_by_exp
from gridsieve.services.encoder.tower.graphs import with_graphs, without_graphs
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.packing import Side
from gridsieve.services.encoder.tower.parallel.division import Share
from gridsieve.services.encoder.tower.parallel.exchange import TIMEOUT, Exchange
from gridsieve.services.encoder.tower.parallel.tensor import TensorParallelTower
from gridsieve.services.encoder.tower.parallel.tower import DataParallelTower, ParallelTower, packing_of
from gridsieve.services.encoder.tower.tower import ModelForward, Tower

# Below, compiling takes longer than it saves in many requests.
COMPILED_FROM_WEIGHTS = 4_000_000
# `--batch-tokens` counts tokens of so many patches, whatever a tower makes of them: the work is that of its patches.
PATCHES_A_TOKEN = 4

MIB = 2**20

_RANK = "gridsieve.services.encoder.startup.rank"

log = structlog.get_logger()


def ranks_of(settings: EncoderSettings) -> tuple[str, int]:
    """The flag that says how many ranks there are, and their number. Raises StartupError if two flags do."""
    data, tensor = settings.data_parallel, settings.tower_tensor_parallel
    if data > 1 and tensor > 1:
        raise StartupError(f"--data-parallel {data} and --tower-tensor-parallel {tensor}: one of them must be 1")
    return ("--tower-tensor-parallel", tensor) if tensor > 1 else ("--data-parallel", data)


@contextmanager
def parallel_tower(settings: EncoderSettings) -> Iterator[ParallelTower]:
    """The tower of all ranks, until every rank has ended.

    A rank that cannot start ends this process. Raises StartupError if rank 0 cannot start.
    """
    (flag, count), rank_failure = ranks_of(settings), RankFailure()
    device, share = device_of(settings.device, flag, count), share_of(settings, 0)
    meeting = meeting_place()
    facts = {"settings": settings.model_dump(mode="json"), "meeting": str(meeting)}
    with closing(Ranks(_RANK, count, facts, rank_failure.record)) as others:
        own = load_rank(settings, device, share)  # while the other ranks load theirs
        for rank in range(1, count):
            others.receive(rank)
        # After loading and capturing: joining has a timeout, and NCCL's work must not get into a captured graph.
        group = join_ranks(meeting, 0, settings, device, share) if count > 1 else None
        try:
            max_tokens = budget_of(own, settings)
            kind = TensorParallelTower if share else DataParallelTower
            towers = kind(own, others, count, Exchange(group), max_tokens, rank_failure)
            if device.type == "cuda":
                run_largest(towers, packing_of(own, max_tokens).largest)
                free_bytes, _ = torch.cuda.mem_get_info(device)
                held_bytes = torch.cuda.memory_reserved(device)
                log.info("largest forward held", held_mib=held_bytes // MIB, free_mib=free_bytes // MIB)
            yield towers
        finally:
            if rank_failure.cause is not None:  # the other ranks may wait for ever for the failed one
                others.kill()
    if group is not None and rank_failure.cause is None:
        leave(device)


def share_of(settings: EncoderSettings, rank: int) -> Share | None:
    """A rank's share of the tower; None: it has all of it."""
    return Share(rank, settings.tower_tensor_parallel) if settings.tower_tensor_parallel > 1 else None


def join_ranks(meeting: Path, rank: int, settings: EncoderSettings, device: torch.device, share: Share | None) -> Any:
    """The process group of the ranks of the tower, in which `share` computes from now on.

    meeting, and what it raises: see `compute.group.join`.
    """
    flag, count = ranks_of(settings)
    bound_to = device if device.type == "cuda" else None
    join(meeting, rank, count, device, flag, TIMEOUT, bound_to)
    if share:
        share.group = dist.group.WORLD
    return dist.group.WORLD


def load_rank(settings: EncoderSettings, device: torch.device, share: Share | None, hears: bool = True) -> Tower:
    """The tower of one rank, or its share of one, with adapters and graphs. device: from `device_of`. hears: whether it
    encodes sounds.

    Raises StartupError if it cannot be loaded.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    tower = load_tower(Checkpoint.find(settings.model), settings.dtype, device, settings.tower_attention, share, hears)
    tower = with_adapters(tower, settings.adapters)
    large = tower.sizes.patch_weights >= COMPILED_FROM_WEIGHTS
    # Compiled layers that read the ends of sequences on the host were not tried on CUDA.
    splits = device.type == "cuda" and not tower.forward.varlen  # type: ignore[attr-defined]  # a `ModelForward`
    if settings.compile == "on" or (settings.compile == "auto" and large and not splits):
        compile_tower(tower)
    # A captured forward would have no sums: the ranks join later. A bucket is padded to more than one slice.
    plain = share or settings.deterministic
    return without_graphs(tower) if plain else with_graphs(tower, budget_of(tower, settings))


def budget_of(tower: Tower, settings: EncoderSettings) -> int:
    """Merged patches of one forward: those of `--batch-tokens`, each of PATCHES_A_TOKEN patches.

    Of a deterministic tower so few that each slice has a forward to itself.
    """
    if settings.deterministic:
        return 1
    return max(1, settings.batch_tokens * PATCHES_A_TOKEN // tower.patches.merge**2)


def compile_tower(tower: Tower) -> bool:
    """Compiles a tower's layers, and those of its adapters, which share them. Returns False if that fails."""
    forward, shape = tower.forward, tower.patches
    assert isinstance(forward, ModelForward)
    fixed = forward.shape.fixed
    sides = [fixed, fixed] if fixed else [Side(shape.merge * tokens, shape.merge * tokens) for tokens in (2, 3)]
    frames = [(shape.temporal_patch, rows * shape.patch_px, columns * shape.patch_px, 3) for rows, columns, *_ in sides]
    slices = [torch.zeros(each, dtype=shape.frame_dtype) for each in frames]
    if forward.device.type == "cpu":
        gelu_by_exp(forward.layers)
    compiled = compile_layers(forward.layers, lambda: tower.encode(slices))
    if compiled and tower.adapted:
        digest, adapted = next(iter(tower.adapted.items()))
        assert isinstance(adapted.forward, ModelForward)
        own = [each for each in adapted.forward.layers if each not in forward.layers]
        if forward.device.type == "cpu":
            gelu_by_exp(own)
        compiled = compile_layers(own, lambda: tower.encode(slices, digest))
    return compiled
