"""The tower on a device.

The checkpoint has the published tower and a language model of one small layer. Frames are on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.call import ROOFLINE, Call, Part, longest_kernels
from benchmarks.gpu.device import seconds
from benchmarks.table import Row
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import AFTER_TOWER, EVS, NONE, ItemPruning
from gridsieve.services.encoder.pruning.methods import keep_tokens
from gridsieve.services.encoder.settings import EncoderSettings
from gridsieve.services.encoder.startup.build import compile_tower
from gridsieve.services.encoder.tower import graphs
from gridsieve.services.encoder.tower.graphs import with_graphs
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.tower import Tower

RATE = 0.75
BATCH_TOKENS: int = EncoderSettings.model_fields["batch_tokens"].default
REPEATS = 8
# Time that each may need at most.
GRAPHS_S, FORWARDS_S = 60, 20


def parts(call: Call) -> dict[str, Part]:
    """In the order in which they are measured: what matters most comes first."""
    measured = DrawnTower(call)
    return {
        "graphs": measured.graphs,
        "forwards": measured.forwards,
        "kernels": measured.kernels,
        "pruning": measured.pruning,
    }


class DrawnTower:
    """The tower of a checkpoint that is drawn on the device."""

    def __init__(self, call: Call) -> None:
        self._call, self._target, self._device = call, call.target, call.device

    @cached_property
    def _tower(self) -> Tower:
        layout = self._target.layout
        small = replace(layout, shape=replace(layout.shape, layers=1, intermediate=64), vocabulary=None)
        folder = Path(self._call.made.enter_context(TemporaryDirectory()))
        checkpoint = small.save(small.drawn(self._device, self._call.dtype), folder)
        tower = load_tower(Checkpoint(checkpoint), "auto", self._device)
        compile_tower(tower)
        return tower

    def graphs(self) -> Iterator[Row]:
        """Each video by replays of graphs of up to so many tokens, and by the same forwards without."""
        for budget in self._target.budgets:
            if not self._call.fits(f"graphs of up to {budget} tokens", GRAPHS_S):
                continue
            replaying = with_graphs(self._tower, budget)
            for grid in self._target.grids:
                slices = self._slices(grid)
                with patch.object(graphs, "pays", return_value=True):  # also where it is slower
                    replayed_s = self._median(partial(_encode, replaying, slices, grid, budget))
                eager_s = self._median(partial(_encode, self._tower, slices, grid, budget))
                tokens = _at_once(grid, budget) * grid.slice_tokens
                note = f"forwards of {tokens} tokens" if replaying.packing else "nothing was captured here"
                what = f"{_name(grid)} by graphs of up to {budget} tokens"
                yield Row(what, "the same without graphs", replayed_s, eager_s, "s", note=note)

    def forwards(self) -> Iterator[Row]:
        """Tokens/s as in the service, against the roofline."""
        if not self._call.fits("forwards", GRAPHS_S):
            return
        weights = (self._tower.sizes.patch_weights + self._tower.sizes.token_weights) * self._call.dtype.itemsize
        for grid in self._target.grids:
            slices = self._slices(grid)
            forwards = math.ceil(grid.t / _at_once(grid, BATCH_TOKENS))
            operations = 2 * sum(self._tower.cost(each.shape) for each in slices)  # multiplications and additions
            least_s = self._call.peaks.least_s(operations, forwards * weights)
            taken_s = self._median(partial(_encode, self._as_served, slices, grid, BATCH_TOKENS))
            note = f"{taken_s * 1e3:.2f} ms"
            yield Row(_name(grid), ROOFLINE, grid.tokens / taken_s, grid.tokens / least_s, "tokens/s", note=note)

    def kernels(self) -> Iterator[Row]:
        """The longest kernels of the first video's forwards, without graphs."""
        if self._call.fits("kernels", FORWARDS_S):
            grid = self._target.grids[0]
            work = partial(_encode, self._tower, self._slices(grid), grid, BATCH_TOKENS)
            yield from longest_kernels(_name(grid), work, self._device, REPEATS // 2)

    def pruning(self) -> Iterator[Row]:
        """Scoring, selecting and gathering at rate 0.75 by each method against the tower's forwards, per token."""
        for grid in self._target.grids:
            if not self._call.fits(f"pruning of {_name(grid)}", FORWARDS_S):
                continue
            slices = self._slices(grid)
            embeds = _encode(self._as_served, slices, grid, BATCH_TOKENS)
            tower_s = self._median(partial(_encode, self._as_served, slices, grid, BATCH_TOKENS)) / grid.tokens
            for method in AFTER_TOWER:
                if method != NONE:  # which neither scores nor gathers
                    pruned_s = self._median(partial(_prune, embeds, grid, method)) / grid.tokens
                    yield Row(f"{method} of {_name(grid)}", "the tower", pruned_s, tower_s, "s/token", at_most=0.02)

    @cached_property
    def _as_served(self) -> Tower:
        return with_graphs(self._tower, BATCH_TOKENS)

    def _median(self, work: Callable[[], object]) -> float:
        return seconds(work, self._device, REPEATS)

    def _slices(self, grid: Grid) -> list[Tensor]:
        """Slices of uint8 (F, H, W, 3) on the device."""
        patches = self._tower.patches
        shape = (grid.t, patches.temporal_patch, grid.h * patches.token_px, grid.w * patches.token_px, 3)
        draw = torch.Generator(self._device).manual_seed(0)
        return list(torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw, device=self._device))


def _name(grid: Grid) -> str:
    return f"{grid.t} slices of {grid.h}×{grid.w} tokens"


def _at_once(grid: Grid, budget: int) -> int:
    return min(grid.t, max(1, budget // grid.slice_tokens))


def _encode(tower: Tower, slices: list[Tensor], grid: Grid, budget: int) -> Tensor:
    """Encodes in forwards of as many slices as fit the budget."""
    most = _at_once(grid, budget)
    forwards = (slices[start : start + most] for start in range(0, len(slices), most))
    return torch.cat([embeds for forward in forwards for embeds in tower.encode(forward)], dim=1)


@torch.inference_mode()
def _prune(embeds: Tensor, grid: Grid, method: str = EVS) -> Tensor:
    return embeds[:, keep_tokens(embeds[0], grid, ItemPruning(RATE, method)).long()]
