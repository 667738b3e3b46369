"""CUDA graphs of a tower's forward: one captured per bucket at the start, replayed for any slices that fit into it.

    patches:   [ a a a a b b b c c · · · ]      uint8; all rows are written before each replay, padding included
    layout:    [ a a a a b b b c c · · · ]      positions, order, ends, interpolation: see `packing.pad`

Padding is in no sequence and in tokens of its own, so it affects no slice. The output is copied, because the next
replay overwrites it. It knows no family, and CUDA only in `CudaDevice`.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from statistics import median
from typing import Protocol

import structlog
import torch
from torch import Tensor

from framesieve.services.encoder.metrics import EAGER_FORWARDS, GRAPH_PADDING_TOKENS, GRAPH_REPLAYS, GRAPH_TOKENS
from framesieve.services.encoder.tower.graph_buckets import (
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
    graph_buckets,
    packing_size,
    pays,
)
from framesieve.services.encoder.tower.packing import Side, TowerShape, lay_out, pad, size_of
from framesieve.services.encoder.tower.tower import ModelForward, Tower
from framesieve.services.encoder.tower.transfers import pin

# The smallest bucket: few slices are smaller, and a graph of fewer tokens is no faster.
LEAST_TOKENS = 64
_ROUNDS = 5

log = structlog.get_logger()

for _reason in Eager:
    EAGER_FORWARDS.labels(_reason.value)


@dataclass(frozen=True, slots=True)
class Captured:
    """output: the result of the last `replay`, until the next one."""

    replay: Callable[[], None]
    output: Tensor


class Device(Protocol):
    def capture(self, inputs: Sequence[Tensor], compute: Callable[[], Tensor]) -> Captured:
        """Captures `compute`, which reads `inputs`; their content is written before each replay.

        Raises RuntimeError if `compute` does something that cannot be captured.
        """

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


def capture(forward: ModelForward, patch_values: int, most_tokens: int, device: Device) -> TowerGraphs:
    """Captures all buckets, largest first, so that smaller graphs reuse its memory. Raises RuntimeError on failure."""
    ranges = bucket_ranges(forward.shape, most_tokens)
    largest_first = sorted(dict.fromkeys(chain.from_iterable(ranges)), key=lambda each: -each.tokens)
    graphs = {each: _Graph(forward, patch_values, each, device) for each in largest_first}
    measured = {each: _measure(forward, graph, device) for each, graph in graphs.items()}
    return TowerGraphs(forward, graphs, [[measured[each] for each in buckets] for buckets in ranges])


def bucket_ranges(shape: TowerShape, most_tokens: int) -> list[list[Size]]:
    """The buckets of a tower, ascending, for each range of lengths of slices; short ones may be in both."""
    if shape.fixed:
        longest = size_of(shape.fixed, shape).longest
        tokens = graph_buckets(min(longest, most_tokens), most_tokens)
        return [[bucket_size(each, longest, 0, blocks=1) for each in tokens]]
    tokens = graph_buckets(min(LEAST_TOKENS, most_tokens), most_tokens)
    return [
        [bucket_size(each, tiles * TILE_ROWS // shape.merge**2, shape.window_side**2) for each in tokens]
        for tiles in LONGEST_TILES
    ]


class _Graph:
    """The captured graph of one bucket, and its input buffers."""

    def __init__(self, forward: ModelForward, patch_values: int, size: Size, device: Device) -> None:
        self.size, self._shape = size, forward.shape
        patches = torch.zeros(self._shape.rows(size), patch_values, dtype=torch.uint8)
        token = lay_out([Side(self._shape.merge, self._shape.merge)], self._shape)
        layout = pad(token, size, self._shape).map(torch.from_numpy)
        self.patches = patches.to(forward.device)
        self._layout = layout.map(lambda array: array.to(forward.device))
        inputs = [self.patches, *self._layout.arrays]
        self._captured = device.capture(inputs, partial(forward.compute, self.patches, self._layout))

    def replay(self, patches: Tensor, sides: Sequence[Side]) -> Tensor:
        """See `Tower.forward`; for slices that fit into the bucket."""
        rows = len(patches)
        self.patches[:rows].copy_(patches)
        self.patches[rows:].zero_()
        layout = pad(lay_out(sides, self._shape), self.size, self._shape)
        for buffer, array in zip(self._layout.arrays, layout.arrays, strict=True):
            buffer.copy_(pin(torch.from_numpy(array), buffer.device), non_blocking=True)
        self._captured.replay()
        return self._captured.output[:, : self._shape.tokens(sides)].clone()


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


class CudaDevice:
    """Captures CUDA graphs into one memory pool, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, inputs: Sequence[Tensor], compute: Callable[[], Tensor]) -> Captured:
        """See `Device.capture`.

        Runs `compute` once so that libraries initialise themselves, and once with synchronisation forbidden: an error
        there leaves the process in a better state than a failed capture.
        """
        # `torch.cuda.graph` leaves its own stream current if a capture fails to end.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                compute()
                with _synchronising_raises():
                    compute()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                output = compute()
            torch.cuda.current_stream().wait_stream(self._stream)
        return Captured(graph.replay, output)

    def measure_s(self, run: Callable[[], object]) -> float:
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        run()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - start


@contextmanager
def _synchronising_raises() -> Iterator[None]:
    """Makes synchronising with the device raise RuntimeError, since it cannot be captured."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch warns that this mode is experimental
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@torch.inference_mode()
def with_graphs(tower: Tower, most_tokens: int, device: Device | None = None) -> Tower:
    """The tower with graphs of up to `most_tokens` tokens. device: None captures on the tower's own.

    Without variable-length attention, or if capturing fails, the tower runs without graphs.
    """
    forward = tower.forward
    assert isinstance(forward, ModelForward)
    uncaptured = replace(tower, forward=TowerGraphs(forward, {}, []))
    if not forward.varlen:
        return uncaptured
    start = time.perf_counter()
    try:
        graphs = capture(forward, tower.patches.patch_values, most_tokens, device or CudaDevice(tower.device))
    except RuntimeError as error:
        # Ending a failed capture raises an error of its own. No local variable for the error: its traceback would form
        # a cycle with this frame and keep the buffers of the capture alive.
        log.warning("the tower runs without graphs", error=str(error.__context__ or error))
        return uncaptured
    log.info("tower captured", graphs=len(graphs.buckets), seconds=round(time.perf_counter() - start, 3))
    packing = PackingLimit(
        packing_size(graphs.buckets), lambda frames: size_of(tower.patches.side(frames), forward.shape)
    )
    return replace(tower, forward=graphs, packing=packing)
