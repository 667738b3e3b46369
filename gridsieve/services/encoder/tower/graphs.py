"""CUDA graphs of a tower's forward: one captured per bucket at the start, replayed for any slices that fit into it.

    patches:   [ a a a a b b b c c · · · ]      all rows are written before each replay, padding included
    layout:    [ a a a a b b b c c · · · ]      positions, order, ends, interpolation: see `packing.pad`

Padding is in no sequence and in tokens of its own, so it affects no slice. The output is copied, because the next
replay overwrites it. It knows no family.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from statistics import median
from typing import Protocol

import structlog
import torch
from torch import Tensor

from gridsieve.services.compute.graphs import Capture, Captured, CudaCapture, doubling
from gridsieve.services.compute.transfers import pinned_for
from gridsieve.services.encoder.metrics import EAGER_FORWARDS, GRAPH_PADDING_TOKENS, GRAPH_REPLAYS, GRAPH_TOKENS
from gridsieve.services.encoder.tower.graph_buckets import (
    LONGEST_TILES,
    NOTHING,
    TILE_ROWS,
    Eager,
    Measured,
    PackingLimit,
    Size,
    bucket_size,
    choose,
    excess,
    fitting,
    packing_size,
    pays,
)
from gridsieve.services.encoder.tower.packing import PackedLayout, Side, TowerShape, lay_out, pad, size_of
from gridsieve.services.encoder.tower.patches import PatchShape, side_of
from gridsieve.services.encoder.tower.tower import ModelForward, Tower

# The smallest bucket: few slices are smaller, and a graph of fewer tokens is no faster.
LEAST_TOKENS = 64
_ROUNDS = 5

log = structlog.get_logger()

for _reason in Eager:
    EAGER_FORWARDS.labels(_reason.value)


class Device(Capture, Protocol):
    """Captures a tower's graphs, and measures them."""

    def measure_s(self, run: Callable[[], object]) -> float:
        """The time from the call of `run` until the device is idle."""


class TowerGraphs:
    """A tower's forward that replays a graph if a bucket holds the slices and its padding pays. Counts both cases."""

    def __init__(
        self, forward: ModelForward, graphs: Mapping[Size, _Graph], ranges: Sequence[Sequence[Measured]]
    ) -> None:
        """graphs: by bucket. ranges: for each range of lengths of slices, its buckets' times, ascending."""
        self.shape = forward.shape
        self._forward = forward
        self._graphs = graphs
        self._range_of = {each.bucket: measured for measured in reversed(ranges) for each in measured}
        self.buckets = list(dict.fromkeys(each.bucket for measured in ranges for each in measured))

    def __call__(self, patches: Tensor, sides: Sequence[Side]) -> Tensor:
        """See `Tower.forward`."""
        load = sum((size_of(side, self.shape) for side in sides), NOTHING)
        chosen = choose(load, self.buckets)
        if isinstance(chosen, Size) and not pays(load, chosen, self._range_of[chosen]):
            chosen = Eager.PADDING
        if isinstance(chosen, Eager):
            EAGER_FORWARDS.labels(chosen.value).inc()
            return self._forward(patches, sides)
        GRAPH_REPLAYS.inc()
        GRAPH_TOKENS.inc(load.tokens)
        GRAPH_PADDING_TOKENS.inc(chosen.tokens - load.tokens)
        return self._graphs[chosen].replay(patches, sides)


def capture(forward: ModelForward, patches: PatchShape, max_tokens: int, device: Device) -> TowerGraphs:
    """Captures all buckets, largest first, so that smaller graphs reuse its memory. Raises RuntimeError on failure."""
    ranges = bucket_ranges(forward.shape, max_tokens)
    largest_first = sorted(dict.fromkeys(chain.from_iterable(ranges)), key=lambda each: -each.tokens)
    graphs = {each: _captured(forward, patches, each, device) for each in largest_first}
    measured = {each: _measure(forward, graph, device) for each, graph in graphs.items()}
    return TowerGraphs(forward, graphs, [[measured[each] for each in buckets] for buckets in ranges])


def bucket_ranges(shape: TowerShape, max_tokens: int) -> list[list[Size]]:
    """The buckets of a tower, ascending, for each range of lengths of slices; short ones may be in both."""
    if shape.fixed:
        longest = size_of(shape.fixed, shape).longest
        tokens = doubling(min(longest, max_tokens), max_tokens)
        return [[bucket_size(each, longest, 0, blocks=1) for each in tokens]]
    tokens = doubling(min(LEAST_TOKENS, max_tokens), max_tokens)
    return [
        [bucket_size(each, tiles * TILE_ROWS // shape.merge**2, shape.window_side**2) for each in tokens]
        for tiles in LONGEST_TILES
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """The captured graph of one bucket, and the buffers that it reads: patches and their layout."""

    size: Size
    shape: TowerShape
    patches: Tensor
    layout: PackedLayout[Tensor]
    captured: Captured

    def replay(self, patches: Tensor, sides: Sequence[Side]) -> Tensor:
        """See `Tower.forward`; for slices that fit into the bucket."""
        rows = len(patches)
        self.patches[:rows].copy_(patches)
        self.patches[rows:].zero_()
        layout = pad(lay_out(sides, self.shape), self.size, self.shape)
        for buffer, array in zip(self.layout.arrays, layout.arrays, strict=True):
            buffer.copy_(pinned_for(torch.from_numpy(array), buffer.device), non_blocking=True)
        self.captured.replay()
        return self.captured.output[:, : self.shape.tokens(sides)].clone()


def _captured(forward: ModelForward, of: PatchShape, size: Size, device: Device) -> _Graph:
    shape = forward.shape
    token = pad(lay_out([Side(shape.merge, shape.merge)], shape), size, shape)
    patches = torch.zeros(shape.rows(size), of.patch_values, dtype=of.frame_dtype, device=forward.device)
    layout = token.map(lambda array: torch.from_numpy(array).to(forward.device))
    captured = device([patches, *layout.arrays], partial(forward.compute, patches, layout))
    return _Graph(size, shape, patches, layout, captured)


def _measure(forward: ModelForward, graph: _Graph, device: Device) -> Measured:
    sides = squares(graph.size, forward.shape)
    filled = sum((size_of(side, forward.shape) for side in sides), NOTHING)
    patches = graph.patches.new_zeros(forward.shape.rows(filled), graph.patches.shape[1])
    times = []
    for run in (graph.replay, forward):
        run(patches, sides)
        times.append(median(device.measure_s(partial(run, patches, sides)) for _ in range(_ROUNDS)))
    log.debug("bucket measured", **asdict(graph.size), replay_s=times[0], eager_s=times[1])
    return Measured(graph.size, *times)


def squares(bucket: Size, shape: TowerShape) -> list[Side]:
    """As many equal squares as the bucket holds, the largest that it takes."""
    sides = (Side(each * shape.merge, each * shape.merge) for each in range(math.isqrt(bucket.longest), 1, -1))
    for side in [shape.fixed] if shape.fixed else sides:
        size = size_of(side, shape)
        if not excess(size, bucket):
            return [side] * fitting([size] * (bucket.tokens // size.tokens), bucket)
    return [Side(shape.merge, shape.merge)]


class CudaDevice(CudaCapture):
    """Implements `Device` for a CUDA device."""

    def measure_s(self, run: Callable[[], object]) -> float:
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        run()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - start


@torch.inference_mode()
def with_graphs(tower: Tower, max_tokens: int, device: Device | None = None) -> Tower:
    """The tower with graphs of up to `max_tokens` tokens, and as many again for its adapters together.

    device: None captures on the tower's own. Without variable-length attention, or if capturing fails, the tower runs
    without graphs.
    """
    forward = tower.forward
    assert isinstance(forward, ModelForward)
    if not forward.varlen:
        return without_graphs(tower)
    capturing = device or CudaDevice(tower.device)
    graphed = _each_forward(tower, lambda each: _captured_or_eager(each, tower.patches, max_tokens, capturing))
    graphs = graphed.forward
    assert isinstance(graphs, TowerGraphs)
    if not graphs.buckets:
        return graphed
    packing = PackingLimit(
        packing_size(graphs.buckets), lambda frames: size_of(side_of(frames, tower.patches), forward.shape)
    )
    return replace(graphed, packing=packing)


def without_graphs(tower: Tower) -> Tower:
    """The tower, whose forwards are counted as those without a graph."""
    return _each_forward(tower, _eager)


def _each_forward(tower: Tower, change: Callable[[ModelForward], TowerGraphs]) -> Tower:
    """The tower with another forward, and another one of its adapters, which share it."""
    assert isinstance(tower.forward, ModelForward)
    forward, adapted = change(tower.forward), tower.adapted
    if adapted:
        shared = next(iter(adapted.values())).forward
        assert isinstance(shared, ModelForward)
        graphs = change(shared)
        adapted = {digest: replace(each, forward=graphs) for digest, each in adapted.items()}
    return replace(tower, forward=forward, adapted=adapted)


def _captured_or_eager(forward: ModelForward, patches: PatchShape, max_tokens: int, device: Device) -> TowerGraphs:
    start = time.perf_counter()
    try:
        graphs = capture(forward, patches, max_tokens, device)
    except RuntimeError as error:
        # Ending a failed capture raises an error of its own. No local variable for the error: its traceback would form
        # a cycle with this frame and keep the buffers of the capture alive.
        log.warning("the tower runs without graphs", error=str(error.__context__ or error))
        return _eager(forward)
    log.info("tower captured", graphs=len(graphs.buckets), seconds=round(time.perf_counter() - start, 3))
    return graphs


def _eager(forward: ModelForward) -> TowerGraphs:
    return TowerGraphs(forward, {}, [])
