"""Temporal slices of many requests into forwards: what is there, first come first served, up to a budget.

    queue:    [a0 a1 a2 b0 | b1 c0 ...]        | the budget's end
    forward:  [a0 a1 a2 b0]                    while it runs, more slices queue up for the next
              [a0] [a1] [a2] [b0]              where the device has no memory for them together

One thread runs the tower; whoever submits may be on any thread. It knows neither gRPC nor what slices belong to.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import TypeAlias

import structlog
import torch
from torch import Tensor

from common.contract.errors import Unavailable
from common.telemetry.metrics import busy
from services.encoder.metrics import BATCH_SLICES, BATCH_TOKENS
from services.encoder.tower.graph_buckets import Packing, Size, fitting, tokens_alone

log = structlog.get_logger()

Encode: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Forward:
    """When a forward began and ended, on this host's monotonic clock."""

    begun_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """One temporal slice: its frames, uint8 (F, H, W, 3), and where its embeddings go, (1 + levels, h·w, D)."""

    frames: Tensor
    target: Tensor
    size: Size
    encoded: Future[Forward] = field(default_factory=Future)
    queued_ns: int = field(default_factory=monotonic_ns)


class Batcher:
    """Runs `encode` on a thread of its own; a slice above the budget gets a forward to itself."""

    def __init__(self, encode: Encode, budget_tokens: int, packing: Packing | None = None) -> None:
        """packing: where more than tokens counts in a budget of so many."""
        self.budget_tokens = budget_tokens
        self._packing = packing
        self._largest = packing.largest if packing else tokens_alone(budget_tokens)
        self._encode = encode
        self._queue: deque[Slice] = deque()
        self._changed = threading.Condition()
        self._running: set[Slice] = set()
        self._ended: Unavailable | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tower", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether slices are taken: until it is closed, given up, or its thread ends by a bug."""
        return not self._closing

    @property
    def queued(self) -> int:
        """How many slices wait."""
        return len(self._queue)

    @property
    def oldest_ns(self) -> int | None:
        """Since when the first of them has waited, on the monotonic clock."""
        with self._changed:
            return self._queue[0].queued_ns if self._queue else None

    def submit(self, frames: Tensor, target: Tensor) -> Future[Forward]:
        """Queues a slice; the future is done once `target` holds its embeddings, or has the forward's error.

        Cancelling the future before its forward starts takes the slice out of the queue.
        Raises Unavailable once there is no thread to take it.
        """
        size = self._packing.size_of(frames.shape) if self._packing else Size(target.shape[1], 1, 0)
        piece = Slice(frames, target, size)
        # Not a closure over the slice: a cycle would keep its target alive until the collector runs.
        piece.encoded.add_done_callback(self._withdraw)
        with self._changed:
            if self._closing:
                raise self._ended or _ended()
            self._queue.append(piece)
            self._changed.notify()
        return piece.encoded

    def close(self) -> None:
        """Ends the thread once its forward is done; what is still queued is cancelled."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            queued = list(self._queue)
        for piece in queued:
            piece.encoded.cancel()
        self._thread.join()

    def give_up(self, error: Unavailable) -> None:
        """Tells everyone who waits, or will: nobody may wait for a thread that has ended, or may never go on."""
        with self._changed:
            self._closing, self._ended = True, error
            self._changed.notify()
            left, self._queue = self._queue, deque()
            running = list(self._running)
        for piece in left:
            if piece.encoded.set_running_or_notify_cancel():
                piece.encoded.set_exception(error)
        self._fail(running, error)

    def _withdraw(self, encoded: Future[Forward]) -> None:
        if not encoded.cancelled():
            return
        with self._changed:
            for piece in [each for each in self._queue if each.encoded is encoded]:
                self._queue.remove(piece)

    def _run(self) -> None:
        try:
            while self._run_batch():
                pass
        except Exception:
            log.exception("the tower's thread ended by a bug")
            self.give_up(_ended())

    def _run_batch(self) -> bool:
        """Waits for a batch and runs it; False once closed. Nothing of it outlives the call: targets are large."""
        batch = self._next_batch()
        if batch and not self._settle(batch):
            log.warning("a forward takes more memory than there is, its slices are run alone", slices=len(batch))
            for piece in batch:
                self._settle([piece])
        return bool(batch)

    def _settle(self, batch: Sequence[Slice]) -> bool:
        """Runs a forward and tells its slices; False, and nobody is told, if there is no memory for so many at once."""
        begun_ns = monotonic_ns()
        try:
            with busy("encode"):
                self._forward(batch)
        except torch.AcceleratorError:  # the device is of no more use to this process: all are told
            raise
        except torch.OutOfMemoryError as error:
            if len(batch) > 1:
                return False
            # A new one: by its traceback, the other holds all that the forward had made.
            self._fail(batch, torch.OutOfMemoryError(str(error)))
        except Exception as error:  # whatever it was, it fails these slices and not the thread
            self._fail(batch, error)
        else:
            forward = Forward(begun_ns, monotonic_ns())
            for piece in self._done(batch):
                piece.encoded.set_result(forward)
        return True

    def _fail(self, batch: Sequence[Slice], error: Exception) -> None:
        for piece in self._done(batch):
            piece.encoded.set_exception(error)

    def _done(self, batch: Sequence[Slice]) -> list[Slice]:
        """Those of them that have not been told that their forward may never end; nobody else gets them."""
        with self._changed:
            done = [piece for piece in batch if piece in self._running]
            self._running.difference_update(done)
        return done

    def _forward(self, batch: Sequence[Slice]) -> None:
        BATCH_SLICES.observe(len(batch))
        BATCH_TOKENS.observe(sum(piece.size.tokens for piece in batch))
        target = batch[0].target
        with torch.cuda.device_of(target):  # current in the main thread alone: others begin with cuda:0
            embeds = self._encode([piece.frames for piece in batch])
            with torch.inference_mode():
                for piece, rows in zip(batch, embeds, strict=True):
                    piece.target.copy_(rows)
            if target.is_cuda:  # what is told as done can be read from any stream
                torch.cuda.current_stream().synchronize()

    def _next_batch(self) -> list[Slice]:
        """At least one slice, waiting for it, which is running from now on; empty once closed."""
        with self._changed:
            running: list[Slice] = []
            while not running:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    return []
                count = fitting((piece.size for piece in self._queue), self._largest)
                taken = [self._queue.popleft() for _ in range(count)]
                running = [piece for piece in taken if piece.encoded.set_running_or_notify_cancel()]
            self._running = set(running)
            return running


def _ended() -> Unavailable:
    return Unavailable("the tower of the encoder has ended", "encoder")
