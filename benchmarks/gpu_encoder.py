"""The tower on a device: against the roofline, with and without CUDA graphs, and each pruning method against it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks import gpu_device
from benchmarks.gpu_run import ROOFLINE, Run
from benchmarks.table import Row
from common.checkpoint import Checkpoint
from common.contract.plan import Grid
from common.contract.retention import EVS, METHODS, NONE, Pruning
from services.encoder.families import load_tower
from services.encoder.pruning.methods import keep_tokens
from services.encoder.settings import EncoderSettings
from services.encoder.tower.graphs import with_graphs
from services.encoder.tower.tower import Tower

RATE = 0.75
BATCH_TOKENS: int = EncoderSettings.model_fields["batch_tokens"].default


def graphs(run: Run) -> list[Row]:
    """A video encoded and pruned at rate 0.75, with and without CUDA graphs."""
    plain, rows = _tower(run), []
    replaying = with_graphs(plain, BATCH_TOKENS)
    for grid in run.target.grids:
        slices = _slices(plain, grid, run.device)
        replayed_s, plain_s = (
            _median(run, partial(_encode_and_prune, tower, slices, grid)) for tower in (replaying, plain)
        )
        rows.append(
            Row(
                f"tower and pruning of {_name(grid)}, with graphs",
                "without",
                replayed_s,
                plain_s,
                "s",
                at_most=0.85 if grid is run.target.grids[0] else None,
                note=f"forwards of {_at_once(grid) * grid.slice_tokens} tokens"
                if replaying.packing
                else "Nothing was captured here: both are the same.",
            )
        )
    return rows


def pruning(run: Run) -> list[Row]:
    """Scoring, selecting and gathering at rate 0.75 by each method against the tower's forwards, per token."""
    tower, rows = with_graphs(_tower(run), BATCH_TOKENS), []
    for grid in run.target.grids:
        slices = _slices(tower, grid, run.device)
        embeds = _encode(tower, slices, grid)
        tower_s = _median(run, partial(_encode, tower, slices, grid)) / grid.tokens
        for method in METHODS:
            if method != NONE:  # which neither scores nor gathers
                pruned_s = _median(run, partial(_prune, embeds, grid, method)) / grid.tokens
                rows.append(Row(f"{method} of {_name(grid)}", "the tower", pruned_s, tower_s, "s/token", at_most=0.02))
    return rows


def tower(run: Run) -> list[Row]:
    """Tokens/s of the tower's forwards, as in the service, against the roofline."""
    tower, rows = with_graphs(_tower(run), BATCH_TOKENS), []
    weights = (tower.sizes.patch_weights + tower.sizes.token_weights) * run.dtype.itemsize
    for grid in run.target.grids:
        slices = _slices(tower, grid, run.device)
        forwards = math.ceil(grid.t / _at_once(grid))
        operations = 2 * sum(tower.cost(each.shape) for each in slices)  # multiplications and additions
        least_s = run.peaks.least_s(operations, forwards * weights)
        taken_s = _median(run, partial(_encode, tower, slices, grid))
        note = f"{taken_s * 1e3:.2f} ms"
        rows.append(
            Row(
                f"tower on {_name(grid)}", ROOFLINE, grid.tokens / taken_s, grid.tokens / least_s, "tokens/s", note=note
            )
        )
    return rows


def _name(grid: Grid) -> str:
    return f"{grid.t}×{grid.h}×{grid.w}"


def _tower(run: Run) -> Tower:
    return load_tower(Checkpoint(run.folder), "auto", run.device)


def _median(run: Run, work: Callable[[], object]) -> float:
    return gpu_device.seconds(work, run.device, repeats=4 * run.rounds)


def _at_once(grid: Grid) -> int:
    return min(grid.t, max(1, BATCH_TOKENS // grid.slice_tokens))


def _encode(tower: Tower, slices: list[Tensor], grid: Grid) -> Tensor:
    """Encodes in forwards of as many slices as fit the service's batches."""
    most = _at_once(grid)
    forwards = (slices[start : start + most] for start in range(0, len(slices), most))
    return torch.cat([embeds for forward in forwards for embeds in tower.encode(forward)], dim=1)


def _encode_and_prune(tower: Tower, slices: list[Tensor], grid: Grid) -> Tensor:
    return _prune(_encode(tower, slices, grid), grid)


@torch.inference_mode()
def _prune(embeds: Tensor, grid: Grid, method: str = EVS) -> Tensor:
    return embeds[:, keep_tokens(embeds[0], grid, Pruning(RATE, method)).long()]


def _slices(tower: Tower, grid: Grid, device: torch.device) -> list[Tensor]:
    """Slices of uint8 (F, H, W, 3) on the device; the transfer of frames is not measured."""
    side_px = tower.patches.token_px
    shape = (grid.t, tower.patches.temporal_patch, grid.h * side_px, grid.w * side_px, 3)
    draw = torch.Generator(device).manual_seed(0)
    return list(torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw, device=device))
