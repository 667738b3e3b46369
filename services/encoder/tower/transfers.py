"""Streams beside the tower's, and copies between host and device that do not make the host wait.

    "upload"         [ frames 2 ]      [ frames 3 ]
    tower's stream   [ forward 1      ][ forward 2      ][ forward 3      ]
    "prune"                            [ prune 1 ]
    of a `Readback`                             [ copy ]· `wait` returns

On CUDA copies go through pinned memory, and only the callers of `Computed.wait` and `Readback.wait` block.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to the device; from host to CUDA through pinned memory, without waiting."""
    return pin(tensor, device).to(device, non_blocking=True)


def pin(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor from which copying to the device does not block: pinned if it goes from host to CUDA."""
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor


@contextmanager
def beside(device: torch.device, purpose: str) -> Iterator[torch.cuda.Stream | None]:
    """Queues what is done inside on a stream of the device for that purpose, and yields it; on the CPU it is just done.

    It waits for nothing on other streams: its inputs must be computed.
    """
    if device.type != "cuda":
        yield None
        return
    stream = _stream_for(device, purpose)
    with torch.cuda.stream(stream):
        yield stream


def taken_over(tensor: Tensor, stream: torch.cuda.Stream | None) -> Tensor:
    """A tensor that was made on a stream of `beside`, for use on the current stream, which waits for it."""
    if stream is not None:
        current = torch.cuda.current_stream(tensor.device)
        current.wait_stream(stream)
        tensor.record_stream(current)
    return tensor


_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
_making_streams = threading.Lock()  # `functools.cache` may call twice, and two streams are not in order


def _stream_for(device: torch.device, purpose: str) -> torch.cuda.Stream:
    with _making_streams:
        if (device, purpose) not in _streams:
            _streams[device, purpose] = torch.cuda.Stream(device, priority=-1)  # before the tower's
        return _streams[device, purpose]


class Computed:
    """When the device has computed what its current stream was given until now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(torch.cuda.current_stream(device))

    @property
    def at_once(self) -> bool:
        """Whether there is nothing to wait for: on the CPU."""
        return self._event is None

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class Readback:
    """Copies tensors to the host, in the state in which the current stream leaves them; on the CPU, no copy."""

    def __init__(self, *tensors: Tensor) -> None:
        """Starts copying. The tensors must not be written to before `wait` has returned."""
        self._sources, self._copies, self._done = tensors, list(tensors), None
        device = tensors[0].device
        if device.type == "cuda":
            self._copies, self._done = _start(tensors, device)

    def wait(self) -> list[Tensor]:
        """The tensors on the host, in their order, once they are copied."""
        if self._done is not None:
            self._done.synchronize()
        self._sources = ()  # kept until now: the copy stream read their memory
        return self._copies


def _start(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[list[Tensor], torch.cuda.Event]:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
        for copy, each in zip(copies, tensors, strict=True):
            copy.copy_(each, non_blocking=True)
        done = torch.cuda.Event(blocking=True)
        done.record(stream)
    return copies, done
