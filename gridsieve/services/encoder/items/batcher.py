"""Batches temporal slices of many requests into forwards of the tower: first come, first served, up to a budget.

    queue:    [a0 a1 a2 b0 | b1 c0 ...]        | the end of the budget
    forward:  [a0 a1 a2 b0]                    while it runs, more slices are queued for the next one
              [a0] [a1] [a2] [b0]              if the device has no memory for them together

A forward has slices of one adapter: that of the first slice in the queue, so those of others wait their turn.

    queue:    [a0 b0 a1 b1]                    a, b: of different adapters
    forward:  [a0 a1]                          the next one is [b0 b1]

Sounds, too, have forwards of their own.

On CUDA a forward is launched while the one before it computes, as soon as the queue fills it: one more slice like the
last would not fit.

One thread runs the tower; slices may be submitted from any thread. It knows neither gRPC nor media items.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from time import monotonic_ns
from typing import TypeAlias

import structlog
import torch
from torch import Tensor

from gridsieve.common.contract.errors import Unavailable
from gridsieve.common.telemetry.metrics import busy
from gridsieve.common.yielding import call_yields, join_line
from gridsieve.services.compute.transfers import Computed
from gridsieve.services.encoder.metrics import BATCH_SLICES, BATCH_TOKENS
from gridsieve.services.encoder.tower.graph_buckets import NOTHING, PackingLimit, Size, excess, fitting
from gridsieve.services.encoder.tower.sound import Sound
from gridsieve.services.encoder.tower.tower import Slice

log = structlog.get_logger()

Encode: TypeAlias = Callable[[Sequence[Slice], bytes], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class ForwardTimes:
    """When a forward began and ended, on this host's monotonic clock."""

    begun_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class _QueuedSlice:
    """frames: of one slice, or a sound. target: on the device that the embeddings are for. store: receives them,
    (1 + levels, tokens, D). adapter: digest of the adapter that the tower computes with; empty: none. yields: to slices
    that do not."""

    frames: Slice
    target: Tensor
    store: Callable[[Tensor], object]
    size: Size
    adapter: bytes = b""
    yields: bool = False
    encoded: Future[ForwardTimes] = field(default_factory=Future)
    queued_ns: int = field(default_factory=monotonic_ns)

    @property
    def kind(self) -> tuple[bytes, bool]:
        """What all slices of a forward have in common."""
        return self.adapter, isinstance(self.frames, Sound)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A forward that the device may still compute."""

    batch: Sequence[_QueuedSlice]
    computed: Computed
    begun_ns: int


class Batcher:
    """Runs `encode` on a thread of its own. A slice larger than the budget gets a forward to itself."""

    def __init__(
        self,
        encode: Encode,
        packing: PackingLimit,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        """packing: of a forward. on_end: called in the thread if an error ends it."""
        self.packing = packing
        self._encode = encode
        self._queue: deque[_QueuedSlice] = deque()
        self._changed = threading.Condition()  # guards the queue and the three fields below
        self._running: set[_QueuedSlice] = set()
        self._ended: Unavailable | None = None
        self._closing = False
        self._launched: _Launched | None = None  # of the tower's thread
        self._forward_began_ns: int | None = None
        self._on_end = on_end
        self._thread = threading.Thread(target=self._run, name="tower", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether slices are accepted: false once it is closed or aborted, or its thread has failed."""
        return not self._closing

    @property
    def forward_began_ns(self) -> int | None:
        """When the forward that runs now began, on the monotonic clock; None between forwards."""
        return self._forward_began_ns

    @property
    def queued(self) -> int:
        """How many slices wait."""
        return len(self._queue)

    @property
    def oldest_ns(self) -> int | None:
        """When the first waiting slice was queued, on the monotonic clock."""
        with self._changed:
            return self._queue[0].queued_ns if self._queue else None

    def submit(
        self,
        frames: Slice,
        target: Tensor,
        store: Callable[[Tensor], object] | None = None,
        adapter: bytes = b"",
    ) -> Future[ForwardTimes]:
        """Queues a slice or a sound, behind others if the running call yields to them. The future completes once
        `target` holds its embeddings, or with the forward's error.

        store: puts the tower's tokens of the slice into `target`, in the tower's thread; None: as they are. adapter:
        digest of the adapter that the tower computes with; empty: none.

        Cancelling the future before its forward starts removes the slice from the queue.
        Raises Unavailable once it is not `alive`.
        """
        size = self.packing.size_of(frames)
        added = _QueuedSlice(frames, target, store or target.copy_, size, adapter, call_yields())
        # A method, not a closure over the slice: the cycle would keep its target alive until the collector runs.
        added.encoded.add_done_callback(self._withdraw)
        with self._changed:
            if self._closing:
                raise self._ended or _tower_ended()
            join_line(self._queue, added, attrgetter("yields"))
            self._changed.notify()
        return added.encoded

    @contextmanager
    def ending_on_device_errors(self) -> Iterator[None]:
        """An error of the device inside ends the tower's service, too: the process can use the device no more.

        It is raised as Unavailable.
        """
        try:
            yield
        except torch.AcceleratorError as error:
            log.exception("the device failed")
            self.abort(_tower_ended())
            self._on_end()
            raise _tower_ended() from error

    def close(self) -> None:
        """Cancels the queued slices and waits for the running forward and the end of the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            queued = list(self._queue)
        for each in queued:
            each.encoded.cancel()
        self._thread.join()

    def abort(self, error: Unavailable) -> None:
        """Fails all running, queued and later slices without waiting for the thread, which may never return."""
        with self._changed:
            self._closing, self._ended = True, error
            self._changed.notify()
            queued, self._queue = self._queue, deque()
            running = list(self._running)
        for each in queued:
            if each.encoded.set_running_or_notify_cancel():
                each.encoded.set_exception(error)
        self._fail(running, error)

    def _withdraw(self, encoded: Future[ForwardTimes]) -> None:
        if not encoded.cancelled():
            return
        with self._changed:
            for withdrawn in [each for each in self._queue if each.encoded is encoded]:
                self._queue.remove(withdrawn)

    def _run(self) -> None:
        try:
            while self._run_batch():
                pass
            self._finish()
        except Exception:
            log.exception("a bug ended the tower's thread")
            self.abort(_tower_ended())
            self._on_end()

    def _run_batch(self) -> bool:
        """Waits for a batch and launches it; False once closed. Keeps no reference to it: targets are large."""
        batch = self._next_batch()
        if batch and not self._launch(batch):
            log.warning("out of memory in a forward, its slices are run one by one", slices=len(batch))
            self._finish()
            for each in batch:
                self._launch([each])
                self._finish()
        return bool(batch)

    def _launch(self, batch: Sequence[_QueuedSlice]) -> bool:
        """Launches a forward, and finishes the one before it. False, with nothing launched, if several slices lack
        memory together."""
        begun_ns = monotonic_ns()
        self._forward_began_ns = self._forward_began_ns or begun_ns
        launched: _Launched | None = None
        try:
            with busy("encode"):
                launched = _Launched(batch, self._forward(batch), begun_ns)
        except torch.AcceleratorError:  # the process can use the device no more: ends the thread, fails all slices
            raise
        except torch.OutOfMemoryError as error:
            if len(batch) > 1:
                return False
            # A new error: the traceback of the old one holds all tensors of the forward.
            self._fail(batch, torch.OutOfMemoryError(str(error)))
        except Exception as error:  # any other error fails these slices and not the thread
            self._fail(batch, error)
        self._finish()
        self._launched = launched
        self._forward_began_ns = begun_ns if launched else None
        if launched and launched.computed.at_once:
            self._finish()
        return True

    def _finish(self) -> None:
        """Waits for the launched forward, if there is one, and completes its slices."""
        launched, self._launched = self._launched, None
        if launched:
            with busy("encode"):
                launched.computed.wait()
            times = ForwardTimes(launched.begun_ns, monotonic_ns())
            for each in self._take_running(launched.batch):
                each.encoded.set_result(times)
        self._forward_began_ns = None

    def _fail(self, batch: Sequence[_QueuedSlice], error: Exception) -> None:
        for each in self._take_running(batch):
            each.encoded.set_exception(error)

    def _take_running(self, batch: Sequence[_QueuedSlice]) -> list[_QueuedSlice]:
        """The slices of the batch that are not completed yet; the caller completes them (`abort` runs concurrently)."""
        with self._changed:
            taken = [each for each in batch if each in self._running]
            self._running.difference_update(taken)
        return taken

    def _forward(self, batch: Sequence[_QueuedSlice]) -> Computed:
        BATCH_SLICES.observe(len(batch))
        BATCH_TOKENS.observe(sum(each.size.tokens for each in batch))
        target = batch[0].target
        with torch.cuda.device_of(target):  # the current device of a new thread is cuda:0
            embeds = self._encode([each.frames for each in batch], batch[0].adapter)
            with torch.inference_mode():
                for each, rows in zip(batch, embeds, strict=True):
                    each.store(rows)
            return Computed(target.device)

    def _next_batch(self) -> list[_QueuedSlice]:
        """Waits for slices and marks as many as fit as running; empty once closed.

        Finishes the launched forward first, unless the next one is full.
        """
        while True:
            with self._changed:
                if self._launched is None or self._full:
                    self._changed.wait_for(lambda: self._queue or self._closing)
                    if self._closing:
                        return []
                    taken = self._take_fitting()
                    running = [each for each in taken if each.encoded.set_running_or_notify_cancel()]
                    if running:
                        self._running.update(running)
                        return running
            self._finish()

    def _take_fitting(self) -> list[_QueuedSlice]:
        """Takes the slices of the next forward from the queue."""
        count = fitting((each.size for each in self._next_slices()), self.packing.largest)
        taken = list(islice(self._next_slices(), count))
        for each in taken:
            self._queue.remove(each)
        return taken

    def _next_slices(self) -> Iterator[_QueuedSlice]:
        """The slices of a queue, in order, that can be in a forward with the first."""
        return (each for each in self._queue if each.kind == self._queue[0].kind)

    @property
    def _full(self) -> bool:
        """Whether one more slice like the last would not fit into the next forward."""
        load = last = NOTHING
        for last in (each.size for each in self._next_slices()):
            load += last
            if excess(load, self.packing.largest):  # of a long queue no more is read
                return True
        return excess(load + last, self.packing.largest) is not None


def _tower_ended() -> Unavailable:
    return Unavailable("the tower of the encoder has ended", "encoder")
