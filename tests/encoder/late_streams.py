"""A stand-in for CUDA whose streams run late: their work runs only once something waits for it.

    "upload"          [ copy ][ patchify ]                     queued, not run
    current stream    [ wait for "upload" ][ forward ]
    event of it       synchronize: runs the current stream, first what it waits for, and nothing else

So work that does not wait for the stream that makes its input reads stale values. Where memory is reused, a freed
tensor is overwritten as soon as its own stream, and those for which it was recorded, have run what they had until then.

Tensors of the device hold their values in the host's memory. Of torch it has what transfers, ranks and items use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from gridsieve.services.compute import transfers

CUDA = torch.device("cuda", 0)
STALE_BYTE = 255

Work: TypeAlias = Callable[[], object]


class LateStream:
    """Of two streams that it waits for, the one that it waits for later runs first, which no order forbids."""

    def __init__(self) -> None:
        self._work: list[Work] = []
        self._waits: list[tuple[int, LateStream, int]] = []  # which work it is, and the stream and its end then
        self._done = 0

    @property
    def end(self) -> int:
        return len(self._work)

    def queue(self, work: Work) -> None:
        self._work.append(work)

    def wait_stream(self, other: LateStream) -> None:
        self._waits.append((self.end, other, other.end))
        self.queue(lambda: None)

    def run(self, end: int) -> None:
        """Runs the work before `end` that has not run."""
        for place, other, until in reversed(self._waits):
            if self._done <= place < end:
                other.run(until)
        while self._done < end:
            self._done += 1
            self._work[self._done - 1]()


class LateDevice:
    """current: the stream on which work is queued. reuses: whether freed memory is overwritten, as early as it may.
    waits: how often the host has waited."""

    def __init__(self, reuses: bool) -> None:
        self.current = LateStream()
        self.waits = 0
        self._reuses = reuses
        self._freed: list[tuple[LateStream, int]] = []

    def wait(self, stream: LateStream, end: int | None = None) -> None:
        """The host waits for what a stream has, up to `end`."""
        self.waits += 1
        freed, self._freed = self._freed, []
        with torch.inference_mode():
            for owner, overwritten in reversed(freed):
                owner.run(overwritten)
            stream.run(stream.end if end is None else end)

    @contextmanager
    def using(self, stream: LateStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def empty(self, like: Tensor) -> LateTensor:
        """Uninitialised memory, allocated on the current stream."""
        held = torch.empty_like(like, memory_format=torch.contiguous_format)
        _make_stale(held)
        return LateTensor(held, _Memory(self, held))

    def free(self, held: Tensor, owner: LateStream, used_on: Sequence[LateStream]) -> None:
        if self._reuses:
            for each in used_on:
                owner.wait_stream(each)
            owner.queue(lambda: _make_stale(held))
            self._freed.append((owner, owner.end))

    def sent(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        """A copy of a tensor of the host, which is read when the copy runs."""
        target = self.empty(source)
        held = target.held
        self.current.queue(lambda: held.copy_(source))
        if not non_blocking:
            self.wait(self.current)
        return target

    def call(self, function: Any, arguments: Any, named: Any) -> Any:
        """Queues an operator on the current stream. Views are made at once; reading a value waits."""
        plain, plain_named = tree_map(_on_host, (arguments, named))
        work = partial(function, *plain, **plain_named)
        if function is torch.ops.aten._local_scalar_dense.default:
            self.wait(self.current)
            return work()
        if function._schema.is_mutable:
            self.current.queue(work)
            if function is torch.ops.aten.copy_.default and _blocks(*arguments):
                self.wait(self.current)
            return arguments[0]
        found: Any = work()  # of values that may be stale: a view, or of the shape of what it will be
        memory = _memory_of(arguments)
        if isinstance(found, (list, tuple)):  # of views
            return [LateTensor(each, memory) for each in found]
        if found.untyped_storage().data_ptr() == memory.held.untyped_storage().data_ptr():
            return LateTensor(found, memory)
        target = self.empty(found)
        held = target.held
        self.current.queue(lambda: held.copy_(work()))
        return target


class _Memory:
    """What tensors that are views of each other share. used_on: other streams for which it is recorded."""

    def __init__(self, device: LateDevice, held: Tensor) -> None:
        self.device, self.held = device, held
        self.used_on: list[LateStream] = []
        weakref.finalize(self, device.free, held, device.current, self.used_on).atexit = False


class LateTensor(Tensor):
    """A tensor of the device. held: its values, once the work that makes them has run.

    device: what Python sees. torch itself sees another, as it refuses to index tensors of a device that it lacks.
    """

    held: Tensor
    memory: _Memory
    device = CUDA

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor, memory: _Memory) -> LateTensor:
        with torch.inference_mode(False):  # whose views are of its own kind, within inference mode and without
            made: LateTensor = torch.Tensor._make_wrapper_subclass(
                cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=torch.device("meta")
            )
        made.held, made.memory = held, memory
        return made

    def record_stream(self, stream: Any) -> None:
        self.memory.used_on.append(stream)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        return _memory_of(arguments).device.call(function, arguments, named or {})


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device = device

    def record(self, stream: LateStream | None = None) -> None:
        self._stream = stream or self._device.current
        self._end = self._stream.end

    def synchronize(self) -> None:
        self._device.wait(self._stream, self._end)


class LateGroup:
    """A process group of NCCL: transfers run on a stream of their own, and waiting makes only the current stream wait.

    arriving: makes what each `recv` receives, when it runs. sent: what was sent, once it has run.
    """

    def __init__(self, device: LateDevice, arriving: Iterator[Tensor]) -> None:
        self.sent: list[Tensor] = []
        self.stream = LateStream()
        self._device, self._arriving = device, arriving

    def send(self, tensors: list[LateTensor], rank: int, tag: int) -> _Transfer:
        held = tensors[0].held
        return self._transfer(tensors, lambda: self.sent.append(held.clone()))

    def recv(self, tensors: list[LateTensor], rank: int, tag: int) -> _Transfer:
        held = tensors[0].held
        return self._transfer(tensors, lambda: held.copy_(next(self._arriving)))

    def _transfer(self, tensors: list[LateTensor], work: Work) -> _Transfer:
        self.stream.wait_stream(self._device.current)
        self.stream.queue(work)
        return _Transfer(self, self._device, tensors)


class _Transfer:
    def __init__(self, group: LateGroup, device: LateDevice, tensors: list[LateTensor]) -> None:
        self._group, self._device, self._tensors = group, device, tensors

    def wait(self) -> None:
        self._device.current.wait_stream(self._group.stream)
        self._tensors = []


class _Factories(TorchFunctionMode):
    """Makes tensors on the device where torch is asked for CUDA, and pins them where it is asked to."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = dict(named or {})
        if function is Tensor.pin_memory:
            return arguments[0].clone()
        if function is Tensor.to and _is_cuda(arguments[1:]):
            given = arguments[0]
            return given if isinstance(given, LateTensor) else self._device.sent(given, **named)
        if named.pop("pin_memory", False):
            return _make_stale(function(*arguments, **named))
        if _is_cuda([named.get("device")]):
            made = function(*arguments, **{**named, "device": "cpu"})
            return self._device.empty(made) if function is torch.empty else self._device.sent(made)
        return function(*arguments, **named)


@contextmanager
def late_streams(reuses: bool) -> Iterator[LateDevice]:
    """torch.cuda, of one device whose streams run late."""
    device = LateDevice(reuses)
    fakes: dict[str, Any] = {
        "Stream": lambda device, priority=0: LateStream(),
        "Event": lambda blocking: LateEvent(device),
        "stream": device.using,
        "current_stream": lambda _: device.current,
    }
    with pytest.MonkeyPatch.context() as patches, _Factories(device):
        patches.setattr(transfers, "_streams", {})
        for name, fake in fakes.items():
            patches.setattr(torch.cuda, name, fake)
        yield device


def _is_cuda(values: Sequence[Any]) -> bool:
    return any(torch.device(each).type == "cuda" for each in values if isinstance(each, (str, torch.device)))


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.held if isinstance(value, LateTensor) else value


def _memory_of(arguments: Any) -> _Memory:
    """That of the first tensor of the device among an operator's arguments."""
    flat = [each for given in arguments for each in (given if isinstance(given, (list, tuple)) else [given])]
    return next(each.memory for each in flat if isinstance(each, LateTensor))


def _blocks(target: Tensor, source: Tensor, non_blocking: bool = False) -> bool:
    """Whether the host waits for a copy. Between dtypes it waits for the transfer, and not for the conversion."""
    on_device = isinstance(target, LateTensor) and isinstance(source, LateTensor)
    return not (non_blocking or on_device or (isinstance(target, LateTensor) and target.dtype != source.dtype))


def _make_stale(memory: Tensor) -> Tensor:
    return memory.fill_(torch.nan if memory.is_floating_point() else STALE_BYTE)
