"""Runs the largest forward before the service serves, so that the process holds from the start the memory it will need.

torch's allocator keeps the memory of a forward for later ones, CUDA loads kernels, and NCCL connects ranks, all at the
first use. So memory that is free on the card when the service serves stays free for others, such as generation's cache.
The embeddings of requests come in addition (--cache-bytes and --output-buffer-bytes limit them), and so do slices
larger than --batch-tokens.
"""

from __future__ import annotations

import structlog
import torch
from torch import Tensor

from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import BEFORE_TOWER, NONE, ItemPruning
from gridsieve.services.compute.transfers import Computed, Readback, beside
from gridsieve.services.encoder.pruning.methods import keep_tokens
from gridsieve.services.encoder.tower.graph_buckets import Size
from gridsieve.services.encoder.tower.graphs import TowerGraphs, squares
from gridsieve.services.encoder.tower.parallel.tower import ParallelTower
from gridsieve.services.encoder.tower.sound import Sound
from gridsieve.services.encoder.tower.tower import Tower

# Of the video that is pruned: its slices, and a rate that leaves most of it.
_SLICES, _RATE = 8, 0.1

log = structlog.get_logger()


@torch.inference_mode()
def run_largest(towers: ParallelTower, largest: Size) -> None:
    """Runs two forwards of all ranks, the second launched while the first computes, prunes by every method, and runs
    a forward with each adapter, and one of a sound.

    largest: what a forward of one rank holds. If the device lacks memory for it, warns: the batcher then runs slices
    one by one.
    """
    slices = largest_slices(towers.own, largest) * towers.count
    try:
        _, embeds = towers.encode(slices), towers.encode(slices)
        joined = torch.cat(embeds, dim=1)[:, : largest.tokens]
        Computed(towers.own.device).wait()
        _prune(towers.own, joined)
        for adapter in towers.own.adapted:
            towers.encode(slices, adapter)
        if sound := towers.own.sound:
            frames = sound.longest_of(largest.tokens * towers.own.patches.merge**2)
            towers.encode([Sound(torch.zeros(sound.mels, frames))])
    except torch.OutOfMemoryError as error:
        log.warning("the device lacks memory for a forward of --batch-tokens", error=str(error))


def largest_slices(tower: Tower, largest: Size) -> list[Tensor]:
    """Black slices, (F, H, W, 3), that fill one forward of one rank."""
    assert isinstance(tower.forward, TowerGraphs)
    frames, px, dtype = tower.patches.temporal_patch, tower.patches.patch_px, tower.patches.frame_dtype
    sides = squares(largest, tower.forward.shape)
    return [torch.zeros(frames, side.rows * px, side.columns * px, 3, dtype=dtype) for side in sides]


def _prune(tower: Tower, embeds: Tensor) -> None:
    """Scores, gathers and reads embeddings, (1 + levels, tokens, D), as those of a video."""
    if embeds.shape[1] < _SLICES:
        return
    grid = Grid(_SLICES, 1, embeds.shape[1] // _SLICES)
    for method in tower.pruning_methods:
        if method not in (NONE, *BEFORE_TOWER):
            with beside(tower.device, "prune"):
                video = embeds[:, : grid.tokens]
                kept = keep_tokens(video[0], grid, ItemPruning(_RATE, method))
                Readback(video[:, kept.long()], kept).wait()
