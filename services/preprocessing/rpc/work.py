"""What decoding and resizing an item takes, for metrics and traces: they take turns in its worker, slice by slice.

asked for ── decode ── resize ── decode ── resize ── over        a span each, and the busy time within it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic_ns

from common.telemetry.metrics import STAGE_BUSY_SECONDS
from common.telemetry.tracing import record
from services.preprocessing.video.slices import Slice


class Work:
    """One item's, from when it is asked for."""

    def __init__(self, media_index: int) -> None:
        self._media_index = media_index
        self._began_ns = monotonic_ns()
        self._frames = 0
        self._decode_s = 0.0
        self._resize_s = 0.0
        self._decoded_ns = 0
        self._resizing_ns = 0
        self._resized_ns = 0

    def add(self, made: Slice) -> None:
        self._frames += len(made.pixels)
        self._decode_s += made.decode_s
        self._resize_s += made.resize_s
        self._resizing_ns = self._resizing_ns or made.decoded_ns
        self._decoded_ns, self._resized_ns = made.decoded_ns, made.resized_ns

    def tell(self, error: BaseException | None) -> None:
        """error: what it ended by, if it was not finished."""
        STAGE_BUSY_SECONDS.labels("decode").observe(self._decode_s)
        STAGE_BUSY_SECONDS.labels("resize").observe(self._resize_s)
        now_ns = monotonic_ns()
        item = {"media_index": self._media_index, "frames": self._frames}
        decoded_ns, resized_ns = (self._decoded_ns, self._resized_ns) if error is None else (now_ns, now_ns)
        # The moments are a worker's own words.
        record("decode", self._began_ns, min(decoded_ns, now_ns), error, busy_s=self._decode_s, **item)
        if self._frames:
            record("resize", self._resizing_ns, min(resized_ns, now_ns), error, busy_s=self._resize_s, **item)


@contextmanager
def worked_on(media_index: int) -> Iterator[Work]:
    """Takes the slices of an item as they come, and tells of them when the block is left."""
    work = Work(media_index)
    try:
        yield work
    except BaseException as error:
        work.tell(error)
        raise
    work.tell(None)
