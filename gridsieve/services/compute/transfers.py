"""Copies between host and device that do not make the host wait, and streams beside the current one.

    "upload"         [ frames 2 ]      [ frames 3 ]                           the encoder's
    current stream   [ forward 1      ][ forward 2      ][ forward 3      ]
    "prune"                            [ prune 1 ]
    of a `Readback`                             [ copy ]· `wait` returns

    current stream   [ step 1 ][ `ToHost` ][ step 2 ][ `ToHost` ]             generation's
                                           · `wait` returns

On CUDA copies go through pinned memory, and only the callers of a `wait` block.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: Tensor | NDArray[Any], device: torch.device) -> Tensor:
    """The values as a tensor on the device. Values that are there already are not copied, on the CPU neither."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    return pinned_for(tensor, device).to(device, non_blocking=True)


def pinned_for(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host in pinned memory if the device is CUDA, else unchanged.

    CUDA blocks the host while it copies pageable memory. torch keeps pinned memory alive until its copy has finished.
    """
    if device.type != "cuda" or tensor.device.type != "cpu" or not tensor.numel():
        return tensor
    return tensor.contiguous().pin_memory()


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
            _streams[device, purpose] = torch.cuda.Stream(device, priority=-1)  # goes before the current one
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
    """Copies tensors to the host, in the state in which the current stream leaves them; on the CPU, no copy.

    The copy runs on a stream of its own, beside what the current stream is given next.
    """

    def __init__(self, *tensors: Tensor) -> None:
        """Starts copying. The tensors must not be written to before `wait` has returned."""
        device = tensors[0].device
        self._sources, self._copies = tensors, tensors
        self._done: Computed | None = None
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                self._copies, self._done = _copied(tensors), Computed(device)

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors on the host, in their order, once they are copied."""
        if self._done is not None:
            self._done.wait()
        self._sources = ()  # kept until now: the copy stream read their memory
        return self._copies


class ToHost:
    """Copies tensors to the host on the current stream, which needs no other stream for a few bytes; on the CPU, no
    copy. The stream may write to the tensors afterwards."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """tensors: all on one device."""
        self._done: torch.cuda.Event | None = None
        self._copies = tuple(tensors)
        if tensors and tensors[0].is_cuda:
            self._copies, self._done = _copied(tensors), torch.cuda.Event()
            self._done.record()

    def wait(self) -> tuple[Tensor, ...]:
        """The copies, once the device has made them."""
        if self._done is not None:
            self._done.synchronize()
        return self._copies


def _copied(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    copies = tuple(torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors)
    for copy, each in zip(copies, tensors, strict=True):
        copy.copy_(each, non_blocking=True)
    return copies
