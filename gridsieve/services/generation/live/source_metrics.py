"""Metrics of the sources that live sessions watch, by the names that their sessions give them.

The series of a name are there while a session watches a source of that name: there are never more names than sessions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram

from gridsieve.common.telemetry.metrics import SECONDS_BUCKETS
from gridsieve.services.generation.live.frames import DropReason

_PREFIX = "gridsieve_generation_source_"

UP = Gauge(f"{_PREFIX}up", "1 while frames of the source come, 0 while it is lost or not opened yet", ["source"])
FRAMES = Counter(f"{_PREFIX}frames_total", "Frames that came of the source", ["source"])
REOPENED = Counter(f"{_PREFIX}reopened_total", "Times that frames came again of the source that was lost", ["source"])
DROPPED = Counter(f"{_PREFIX}dropped_frames_total", "Frames of the source that were not used", ["source", "reason"])
TOKENS = Counter(
    f"{_PREFIX}tokens_total", "Tokens of the source's slices, before and after pruning", ["source", "pruning"]
)
LAG_SECONDS = Histogram(
    f"{_PREFIX}lag_seconds",
    "From the coming of a slice's last frame to the end of the slice's computation",
    ["source"],
    buckets=SECONDS_BUCKETS,
)


class Source:
    """What is counted of one session's source."""

    def __init__(self, name: str, same: list[Source]) -> None:
        """same: all that are watched by this name, which this one joins."""
        self._name, self._same = name, same
        self._up: bool | None = False  # None: it came to its end
        self._played = False
        same.append(self)
        self._frames, self._reopened, self._lag = FRAMES.labels(name), REOPENED.labels(name), LAG_SECONDS.labels(name)
        self._dropped = {reason: DROPPED.labels(name, reason.value) for reason in DropReason}
        self._before, self._after = (TOKENS.labels(name, when) for when in ("before", "after"))
        self._show()

    def plays(self) -> None:
        self._reopened.inc(self._played)
        self._up = self._played = True
        self._show()

    def lost(self) -> None:
        self._up = False
        self._show()

    def ended(self) -> None:
        self._up = None
        self._show()

    def count_frames(self, frames: int) -> None:
        self._frames.inc(frames)

    def count_dropped(self, frames: int, reason: DropReason) -> None:
        self._dropped[reason].inc(frames)

    def count_slice(self, lag_s: float, tokens_full: int, tokens: int) -> None:
        """Counts a slice. tokens_full, tokens: before and after pruning."""
        self._lag.observe(lag_s)
        self._before.inc(tokens_full)
        self._after.inc(tokens)

    def close(self) -> None:
        """Nothing more is counted. The last one of a name takes its series away."""
        self._same.remove(self)
        self._show()
        if self._same:
            return
        for metric in (FRAMES, REOPENED, LAG_SECONDS):
            metric.remove(self._name)
        for reason in DropReason:
            DROPPED.remove(self._name, reason.value)
        for when in ("before", "after"):
            TOKENS.remove(self._name, when)

    def _show(self) -> None:
        """A name is up if all of its sources are. One that came to its end does not count."""
        states = [each._up for each in self._same if each._up is not None]
        if states:
            UP.labels(self._name).set(all(states))
        else:
            UP.remove(self._name)


class Sources:
    """The sources that are watched now."""

    def __init__(self) -> None:
        self._watched: defaultdict[str, list[Source]] = defaultdict(list)

    @contextmanager
    def watched(self, name: str) -> Iterator[Source]:
        source = Source(name, self._watched[name])
        try:
            yield source
        finally:
            source.close()
            if not self._watched[name]:
                del self._watched[name]
