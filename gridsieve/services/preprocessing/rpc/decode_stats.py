"""Metrics and trace spans of decoding and resizing one media item. A worker alternates between both, slice by slice.

selected ── decode ── resize ── decode ── resize ── done        one span for each stage, and its busy time
"""

from __future__ import annotations

from time import monotonic_ns
from types import TracebackType
from typing import Self

from gridsieve.common.telemetry.metrics import STAGE_BUSY_SECONDS
from gridsieve.common.telemetry.tracing import record
from gridsieve.services.preprocessing.video.slices import Slice


class DecodeStats:
    """Collects the times of one item's slices inside its block, from the item's selection on, and then records them."""

    def __init__(self, media_index: int) -> None:
        self._media_index = media_index
        self._began_ns = monotonic_ns()
        self._frames = 0
        self._decode_s = 0.0
        self._resize_s = 0.0
        self._decoded_ns = 0
        self._resizing_ns = 0
        self._resized_ns = 0

    def count(self, made: Slice) -> None:
        self._frames += len(made.pixels)
        self._decode_s += made.decode_s
        self._resize_s += made.resize_s
        # Several workers decode a long video, so that its first slice need not be the first one done.
        self._resizing_ns = min(self._resizing_ns or made.decoded_ns, made.decoded_ns)
        self._decoded_ns = max(self._decoded_ns, made.decoded_ns)
        self._resized_ns = max(self._resized_ns, made.resized_ns)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        STAGE_BUSY_SECONDS.labels("decode").observe(self._decode_s)
        STAGE_BUSY_SECONDS.labels("resize").observe(self._resize_s)
        now_ns = monotonic_ns()
        item = {"media_index": self._media_index, "frames": self._frames}
        decoded_ns, resized_ns = (self._decoded_ns, self._resized_ns) if error is None else (now_ns, now_ns)
        # `min`: times come from a worker, which is not trusted.
        record("decode", self._began_ns, min(decoded_ns, now_ns), error, busy_s=self._decode_s, **item)
        if self._frames:
            record("resize", self._resizing_ns, min(resized_ns, now_ns), error, busy_s=self._resize_s, **item)
