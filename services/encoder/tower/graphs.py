"""Forwards of a tower as graphs: captured at the start, one for each budget, and replayed for whatever fits into it.

    patches:   [ a a a a b b b c c · · · ]      uint8; all rows are written before each replay, padding included
    geometry:  [ a a a a b b b c c · · · ]      positions, order, ends, taps: see `geometry.pad`

Padding stands in no sequence and in tokens of its own, so nothing of it reaches a slice. What is returned is a copy:
the next replay writes over what this one computed. It knows no family, and CUDA in `CudaDevice` alone.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Protocol

import structlog
import torch
from torch import Tensor

from services.encoder.metrics import EAGER_FORWARDS, GRAPH_PADDING_TOKENS, GRAPH_REPLAYS, GRAPH_TOKENS
from services.encoder.tower.forward import ModelForward, pin
from services.encoder.tower.graph_buckets import (
    Eager,
    Measured,
    Packing,
    Size,
    budgets,
    choose,
    excess,
    fitting,
    pays,
    room_of,
)
from services.encoder.tower.packing import Side, TowerShape, lay_out, pad, size_of
from services.encoder.tower.tower import Tower

# Few slices are smaller, and the graph of so many tokens takes no longer than one of fewer.
LEAST_TOKENS = 64
# What a budget is measured with: slices of so many tokens a side, where they fit.
MEASURED_SIDE = 8
_ROUNDS = 5

log = structlog.get_logger()

for _reason in Eager:
    EAGER_FORWARDS.labels(_reason.value)


@dataclass(frozen=True, slots=True)
class Captured:
    """output: what the last `replay` computed, until the next one."""

    replay: Callable[[], None]
    output: Tensor


class Device(Protocol):
    def capture(self, inputs: Sequence[Tensor], compute: Callable[[], Tensor]) -> Captured:
        """Makes a graph of what `compute` does, which reads `inputs`, whose content is written before each replay.

        Raises RuntimeError if it does what no graph can hold.
        """

    def measure_s(self, run: Callable[[], object]) -> float:
        """How long it takes, until the device is done."""


class TowerGraphs:
    """A tower's forward that replays a graph where one holds the slices and is worth its padding; and counts."""

    def __init__(self, forward: ModelForward, graphs: Mapping[Size, _Graph], measured: Sequence[Measured]) -> None:
        """measured: of each graph, ascending."""
        self._forward = forward
        self._graphs = graphs
        self.measured = measured
        self.budgets = [each.budget for each in measured]

    def __call__(self, patches: Tensor, sides: Sequence[Side]) -> Tensor:
        """What `Tower.forward` says."""
        load = sum((size_of(side, self._forward.shape) for side in sides), Size(0, 0, 0))
        chosen = choose(load, self.budgets)
        if isinstance(chosen, Size) and not pays(load, chosen, self.measured):
            chosen = Eager.PADDING
        if isinstance(chosen, Eager):
            EAGER_FORWARDS.labels(chosen.value).inc()
            return self._forward(patches, sides)
        GRAPH_REPLAYS.inc()
        GRAPH_TOKENS.inc(load.tokens)
        GRAPH_PADDING_TOKENS.inc(chosen.tokens - load.tokens)
        return self._graphs[chosen].replay(patches, sides)


def capture(forward: ModelForward, patch_values: int, most_tokens: int, device: Device) -> TowerGraphs:
    """Captures, largest first, so that smaller graphs find their memory in the pool. RuntimeError as from `device`."""
    window_tokens = forward.shape.window_side**2
    ascending = [room_of(each, window_tokens) for each in budgets(min(LEAST_TOKENS, most_tokens), most_tokens)]
    graphs = {each: _Graph(forward, patch_values, each, device) for each in reversed(ascending)}
    return TowerGraphs(forward, graphs, [_measure(forward, graphs[each], device) for each in ascending])


class _Graph:
    """One budget's."""

    def __init__(self, forward: ModelForward, patch_values: int, size: Size, device: Device) -> None:
        self.size, self._shape = size, forward.shape
        patches = torch.zeros(size.tokens * self._shape.merge**2, patch_values, dtype=torch.uint8)
        token = lay_out([(self._shape.merge, self._shape.merge)], self._shape)
        geometry = pad(token, size, self._shape).map(torch.from_numpy)
        self.patches = patches.to(forward.device)
        self._geometry = geometry.map(lambda array: array.to(forward.device))
        inputs = [self.patches, *self._geometry.arrays]
        self._captured = device.capture(inputs, partial(forward.compute, self.patches, self._geometry))

    def replay(self, patches: Tensor, sides: Sequence[Side]) -> Tensor:
        """What `Tower.forward` says, of slices that the budget holds."""
        rows = len(patches)
        self.patches[:rows].copy_(patches)
        self.patches[rows:].zero_()
        geometry = pad(lay_out(sides, self._shape), self.size, self._shape)
        for read, array in zip(self._geometry.arrays, geometry.arrays, strict=True):
            read.copy_(pin(torch.from_numpy(array), read.device), non_blocking=True)
        self._captured.replay()
        return self._captured.output[:, : rows // self._shape.merge**2].clone()


def _measure(forward: ModelForward, graph: _Graph, device: Device) -> Measured:
    sides = _squares(graph.size, forward.shape)
    patches = graph.patches.new_zeros(sum(rows * columns for rows, columns in sides), graph.patches.shape[1])
    times = []
    for run in (graph.replay, forward):
        run(patches, sides)
        times.append(median(device.measure_s(partial(run, patches, sides)) for _ in range(_ROUNDS)))
    return Measured(graph.size, *times)


def _squares(room: Size, shape: TowerShape) -> list[Side]:
    """As many small squares as a budget holds."""
    for side in range(MEASURED_SIDE * shape.merge, shape.merge, -shape.merge):
        size = size_of((side, side), shape)
        if not excess(size, room):
            return [(side, side)] * fitting([size] * (room.tokens // size.tokens), room)
    return [(shape.merge, shape.merge)]


class CudaDevice:
    """Captures CUDA graphs into one pool of memory, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, inputs: Sequence[Tensor], compute: Callable[[], Tensor]) -> Captured:
        """What `Device` says. First without a graph, as libraries set themselves up, and then once more and watched:
        a capture that fails leaves more behind than what fails before it.
        """
        # `torch.cuda.graph` leaves its own stream current if a capture cannot be ended.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                compute()
                with _waiting_fails():
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
def _waiting_fails() -> Iterator[None]:
    """Within, what has the host wait for the device raises RuntimeError: no graph can hold it."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that torch may yet change the mode
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@torch.inference_mode()
def with_graphs(tower: Tower, most_tokens: int, device: Device | None = None) -> Tower:
    """The tower, replaying graphs of up to so many tokens where its attention lets it. device: None is its own.

    A tower that no graph can hold is run as before.
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
        log.warning("the tower runs without graphs", error=str(error.__context__ or error))  # what ended the capture
        return uncaptured
    log.info("tower captured", graphs=len(graphs.budgets), seconds=round(time.perf_counter() - start, 3))
    for each in graphs.measured:
        log.debug("budget measured", tokens=each.budget.tokens, replay_s=each.replay_s, eager_s=each.eager_s)
    packing = Packing(graphs.budgets[-1], lambda frames: size_of(tower.patches.side(frames), forward.shape))
    return replace(tower, forward=graphs, packing=packing)
