"""Makes the slices of one video on several workers side by side, while these are idle.

    worker 1    slices 0 … 29                          the reader gets them in order, whoever made them
    worker 2                   slices 30 … 59
                               from the keyframe before slice 30: little is decoded twice

How many segments there are, and where they end, follows from what the slices cost: as many as workers are idle, none
too short to be worth a worker, and the longest as short as it can be. Workers for which there is no segment lend their
cores to the codec. If the slices of so few segments do not fit the budget of unread bytes, there are more segments than
workers, and they begin one after the other.

A segment gives its worker to another job that waits for one. Slices are the same as those of one worker: a segment that
begins with a damaged frame, whose replacement another segment has, is made again after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

import numpy as np

from gridsieve.common.contract.errors import MediaDamaged
from gridsieve.services.preprocessing.video.cost import SliceCosts, slice_costs
from gridsieve.services.preprocessing.video.decode import MAX_REPAIRED_SHARE, THREADED_FROM_PX
from gridsieve.services.preprocessing.video.pictures import PictureIndex
from gridsieve.services.preprocessing.video.slices import PlannedVideo, Slice
from gridsieve.services.preprocessing.workers.job_queue import MIN_PIECE_BYTES, JobQueue
from gridsieve.services.preprocessing.workers.jobs import VideoSlices

# Seconds on one core. To hand a segment to another worker takes a few milliseconds.
_MIN_S = 0.03
# Share of a segment's cost that may be decoding what another segment decodes, too.
_MAX_TWICE = 1 / 8
# How much sooner a codec with so many threads is done. With more than eight, each gains less than its own cost.
GAINS = {1: 1.0, 2: 1.7, 4: 2.4, 8: 3.1}
# A decoder holds at most sixteen reference frames, and one frame for each thread: 1.2 GB at this size and 10 bits.
_MANY_THREADS_TO_PX = 2**24
_HALVINGS = 20
# A video is divided if its longest segment takes less than this share of its time.
_GAIN_FROM = 0.9
# How far a machine may be from the constants of `video/cost.py`, and the weight of each video in what is learnt.
_MAX_SLOWNESS, _WEIGHT = 8.0, 1 / 8


class SegmentedDecoding:
    """Makes videos on the workers of a queue, and learns how fast they are."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue
        self._slowness = 1.0  # seconds for each that `slice_costs` expects

    @asynccontextmanager
    async def slices_of(self, job: VideoSlices) -> AsyncIterator[AsyncGenerator[Slice, None]]:
        """As `JobQueue.stream`, with as many workers as are idle."""
        idle = self._queue.idle
        if idle < 2 or job.pieces < 2 or job.begin or len(job.video.views) > 1:
            async with self._queue.stream(replace(job, threads=2 if idle > 1 else 1)) as slices:
                yield slices
            return
        costs = slice_costs(job.video)
        segments = self._segments(job, costs, idle)
        async with (
            aclosing(self._joined(segments, idle)) as slices,
            aclosing(self._learning(slices, costs, segments[0].threads)) as learning,
        ):
            yield learning

    def _segments(self, job: VideoSlices, costs: SliceCosts, idle: int) -> list[VideoSlices]:
        video, cost_s = job.video, float(costs.continued.sum()) * self._slowness
        workers = min(idle, int(cost_s / _MIN_S))
        if workers < 2:
            return [job]
        room_bytes = self._queue.inflight.size_bytes // idle
        fitting = max(1, room_bytes // max(job.piece_bytes, MIN_PIECE_BYTES))  # slices of a segment
        if workers * fitting < job.end:
            threads, (ends, _) = 1, segment_ends(costs, -(-job.end // (idle * fitting)) * idle)
        else:
            most = _most_threads(video) if _possible_segments(costs, workers) < workers else 1
            divided = {each: segment_ends(costs, workers // each) for each in GAINS if each <= min(most, workers)}
            threads = min(divided, key=lambda each: divided[each][1] / GAINS[each])
            ends, _ = divided[threads]
        return [VideoSlices(video, begin, end, threads) for begin, end in zip([0, *ends], ends, strict=False)]

    async def _learning(
        self, slices: AsyncGenerator[Slice, None], costs: SliceCosts, threads: int
    ) -> AsyncGenerator[Slice, None]:
        """The slices of a video; after the last one, compares their times with what was expected."""
        taken_s = 0.0
        async for made in slices:
            taken_s += made.decode_s * GAINS[threads] + made.resize_s
            yield made
        slowness = min(max(taken_s / float(costs.continued.sum()), 1 / _MAX_SLOWNESS), _MAX_SLOWNESS)
        self._slowness += (slowness - self._slowness) * _WEIGHT

    async def _joined(self, segments: Sequence[VideoSlices], workers: int) -> AsyncGenerator[Slice, None]:
        video = segments[0].video
        repaired: list[int] = []
        async with AsyncExitStack() as stack:
            opened = deque[tuple[AsyncExitStack, AsyncGenerator[Slice, None]]]()
            for number, segment in enumerate(segments):
                for each in segments[number + len(opened) : number + workers]:
                    own = await stack.enter_async_context(AsyncExitStack())
                    stream = self._queue.stream(each, gives_way=each.begin > 0)
                    opened.append((own, await own.enter_async_context(stream)))
                own, slices = opened.popleft()
                try:
                    async for made in slices:
                        if made.repaired_frames and segment.begin and len(repaired) == segment.begin:
                            await stack.aclose()
                            break
                        repaired.append(made.repaired_frames)
                        _check(video, sum(repaired))
                        yield made
                except MediaDamaged:
                    # If it can decode none of its frames, the segment before it has what replaces them.
                    if not segment.begin or len(repaired) > segment.begin:
                        raise
                    await stack.aclose()
                await own.aclose()
                if len(repaired) < segment.end:
                    break
        if len(repaired) < segments[-1].end:
            rest = VideoSlices(video, len(repaired), segments[-1].end, made_before=list(repaired))
            async with self._queue.stream(rest, gives_way=True) as slices:
                async for made in slices:
                    yield made


def _check(video: PlannedVideo, repaired: int) -> None:
    whole = len(video.places)
    if repaired > MAX_REPAIRED_SHARE * whole:
        text = f"is damaged: {repaired} of its {whole} frames cannot be decoded, at most a tenth may be"
        raise MediaDamaged(text, field=video.source.name)


def _most_threads(video: PlannedVideo) -> int:
    """Threads of a codec that are worth their cost and have memory for the frames that they hold."""
    frame_px = video.index.height_px * video.index.width_px
    if isinstance(video.index, PictureIndex) or frame_px < THREADED_FROM_PX:
        return 1
    return max(GAINS) if frame_px <= _MANY_THREADS_TO_PX else 2


def _possible_segments(costs: SliceCosts, workers: int) -> int:
    """Segments that decode little twice if all workers have one."""
    twice = costs.begun[1:] - costs.continued[1:]
    return 1 + int(np.count_nonzero(twice <= costs.continued.sum() / workers * _MAX_TWICE))


def segment_ends(costs: SliceCosts, most: int) -> tuple[list[int], float]:
    """Ends of at most `most` segments of all slices, in order, of which the longest costs least, and its seconds.

    A segment may begin with each slice for which little is decoded twice.
    """
    twice = costs.begun - costs.continued
    twice[0] = 0
    before = np.concatenate([[0.0], np.cumsum(costs.continued)])
    end = twice.size

    def within(longest_s: float) -> list[int]:
        """Ends of segments that cost at most so much each; empty if there are too many."""
        stops = np.append(np.flatnonzero(twice <= longest_s * _MAX_TWICE), end)
        ends, at = list[int](), 0
        while at < end and len(ends) < most:
            reached = np.searchsorted(before[stops], longest_s + before[at] - twice[at], "right")
            if not reached or stops[reached - 1] <= at:
                return []
            at = int(stops[reached - 1])
            ends.append(at)
        return ends if at == end else []

    best, least_s, most_s = [end], before[-1] / most, before[-1]
    for _ in range(_HALVINGS if most > 1 else 0):
        middle_s = (least_s + most_s) / 2
        if ends := within(middle_s):
            best, most_s = ends, middle_s
        else:
            least_s = middle_s
    return (best, float(most_s)) if most_s < _GAIN_FROM * before[-1] else ([end], float(before[-1]))
