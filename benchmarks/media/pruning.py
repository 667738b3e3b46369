"""Each pruning method, from embeddings to kept embeddings, against the tower's forwards for the same tokens.

Both run in this process with the same threads, on the demo's tower in float32, in forwards as large as the encoder's.
"""

from __future__ import annotations

import time

import torch

from benchmarks.clips import pictures
from benchmarks.table import Row, Timings
from gridsieve.common.checkpoint import DEMO_MODEL, Checkpoint
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import AFTER_TOWER, NONE, ItemPruning
from gridsieve.services.encoder.pruning.methods import keep_tokens
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.tower import Tower

# The first is the grid of the demo's clips; the second that of two minutes of 448×448.
GRIDS = (Grid(16, 4, 4), Grid(60, 16, 16))
BATCH_TOKENS = 2048
RATE = 0.75
AT_MOST = 0.02


def pruning(rounds: int) -> list[Row]:
    """Scoring, selecting and gathering at rate 0.75; all forwards of the tower are measured, none extrapolated."""
    tower = load_tower(Checkpoint(DEMO_MODEL), "float32", torch.device("cpu"))
    return [row for grid in GRIDS for row in _rows(tower, grid, rounds)]


def _rows(tower: Tower, grid: Grid, rounds: int) -> list[Row]:
    slices = _slices(tower, grid)
    at_once = max(1, BATCH_TOKENS // grid.slice_tokens)
    methods = [method for method in AFTER_TOWER if method != NONE]
    taken = Timings()
    with torch.inference_mode():
        for number in range(rounds + 1):
            start = time.perf_counter()
            batches = [slices[first : first + at_once] for first in range(0, grid.t, at_once)]
            encoded = [piece for batch in batches for piece in tower.encode(batch)]
            encoded_at = time.perf_counter()
            embeds = torch.cat(encoded, dim=1)
            for method in methods:
                joined_at = time.perf_counter()
                kept = keep_tokens(embeds[0], grid, ItemPruning(RATE, method))
                gathered = embeds[:, kept.long()]
                end = time.perf_counter()
                assert gathered.shape[1] == kept.numel() < grid.tokens
                if number:  # the first is a warm-up
                    taken.add(method, end - joined_at)
            if number:
                taken.add("tower", encoded_at - start)
    what = f"of {grid.t} slices of {grid.h}×{grid.w} tokens, scored, chosen and gathered"
    return [
        Row(f"{method} {what}", "the tower", taken.median(method), taken.median("tower"), "s", at_most=AT_MOST)
        for method in methods
    ]


def _slices(tower: Tower, grid: Grid) -> list[torch.Tensor]:
    """Slices of uint8 (F, H, W, 3)."""
    frames, token_px = tower.patches.temporal_patch, tower.patches.token_px
    moving = [torch.from_numpy(each) for each in pictures(frames * grid.t, grid.h * token_px, grid.w * token_px)]
    return [torch.stack(moving[first : first + frames]) for first in range(0, len(moving), frames)]
