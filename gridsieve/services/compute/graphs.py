"""CUDA graphs: what a function launches on a device, captured once and replayed without the host's work."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Captured:
    """output: the result of the last `replay`, valid until the next one."""

    replay: Callable[[], None]
    output: Tensor


class Capture(Protocol):
    def __call__(self, inputs: Sequence[Tensor], compute: Callable[[], Tensor]) -> Captured:
        """Captures `compute`, which reads `inputs`; the content of `inputs` is written before each replay.

        Raises RuntimeError if `compute` does something that cannot be captured.
        """


class CudaCapture:
    """Captures CUDA graphs into one memory pool, on a stream of its device; torch's default stream may be another's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, inputs: Sequence[Tensor], compute: Callable[[], Tensor]) -> Captured:
        """Implements `Capture`. Runs `compute` twice before capturing: once so that libraries initialise, once with
        synchronisation forbidden, because an error there leaves less state than a failing capture.
        """
        # `torch.cuda.graph` leaves its stream current if the end of the capture fails.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                compute()
                with _forbid_synchronisation():
                    compute()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                output = compute()
            torch.cuda.current_stream().wait_stream(self._stream)
        return Captured(graph.replay, output)


def doubling(first: int, last: int) -> tuple[int, ...]:
    """Sizes of graphs, ascending: first, 2 · first, 4 · first, … below `last`, then `last`."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return (*found, last)


@contextmanager
def _forbid_synchronisation() -> Iterator[None]:
    """Raises RuntimeError when the host waits for the device, which a graph cannot capture."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch warns that the mode is experimental
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
