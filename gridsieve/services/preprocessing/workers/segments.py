"""Makes the slices of one long video on several workers side by side, while these are idle.

    worker 1    slices 0 … 29                          the reader gets them in order, whoever made them
    worker 2                    slices 30 … 59         begins at a keyframe: nothing is decoded twice

A segment gives its worker to another job that waits for one. Slices are the same as those of one worker: a segment that
begins with a damaged frame, whose replacement another segment has, is made again after it.
"""

from __future__ import annotations

import bisect
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from gridsieve.common.contract.errors import MediaDamaged
from gridsieve.services.preprocessing.video.decode import MAX_REPAIRED_SHARE
from gridsieve.services.preprocessing.video.packets import PacketIndex
from gridsieve.services.preprocessing.video.pictures import PictureIndex
from gridsieve.services.preprocessing.video.slices import PlannedVideo, Slice
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from gridsieve.services.preprocessing.workers.jobs import VideoSlices

# Pixels between the first and the last selected frame. Less is not worth another worker: about a second of decoding.
_MIN_PX = 2**28


@asynccontextmanager
async def slices_of(queue: JobQueue, job: VideoSlices) -> AsyncIterator[AsyncGenerator[Slice, None]]:
    """As `JobQueue.stream`, with as many workers as are idle."""
    segments = _segments(job, queue.workers.idle)
    if len(segments) < 2:
        async with queue.stream(job) as slices:
            yield slices
        return
    async with aclosing(_joined(queue, segments)) as slices:
        yield slices


async def _joined(queue: JobQueue, segments: Sequence[VideoSlices]) -> AsyncGenerator[Slice, None]:
    video = segments[0].video
    repaired: list[int] = []
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(queue.stream(each, gives_way=each.begin > 0)) for each in segments]
        for segment, slices in zip(segments, streams, strict=True):
            async for made in slices:
                if made.repaired_frames and segment.begin and len(repaired) == segment.begin:
                    await stack.aclose()
                    break
                repaired.append(made.repaired_frames)
                _check(video, sum(repaired))
                yield made
            if len(repaired) < segment.end:
                break
    if len(repaired) < segments[-1].end:
        rest = VideoSlices(video, len(repaired), segments[-1].end, made_before=list(repaired))
        async with queue.stream(rest, gives_way=True) as slices:
            async for made in slices:
                yield made


def _check(video: PlannedVideo, repaired: int) -> None:
    whole = len(video.places)
    if repaired > MAX_REPAIRED_SHARE * whole:
        text = f"is damaged: {repaired} of its {whole} frames cannot be decoded, at most a tenth may be"
        raise MediaDamaged(text, field=video.source.name)


def _segments(job: VideoSlices, workers: int) -> list[VideoSlices]:
    """The job in at most `workers` parts of about the same length."""
    video, index = job.video, job.video.index
    frames = video.places[-1] - video.places[0] + 1
    if (
        workers < 2
        or len(video.views) > 1
        or isinstance(index, PictureIndex)
        or index.pts is None
        or frames * index.height_px * index.width_px < _MIN_PX
    ):
        return [job]
    slices = job.end
    possible = [number for number in range(1, slices) if _begins_anew(index, video, number)]
    cuts = {min(possible, key=lambda at: abs(at - share * slices / workers)) for share in range(1, workers) if possible}
    ends = [*sorted(cuts), slices]
    return [VideoSlices(video, begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _begins_anew(index: PacketIndex, video: PlannedVideo, number: int) -> bool:
    """Whether a keyframe lies between the frame before a slice and its first frame."""
    assert index.pts is not None
    first = number * video.slice_frames
    before, wanted = (index.pts[place] for place in video.places[first - 1 : first + 1])
    return bisect.bisect_right(index.keyframes, wanted) > bisect.bisect_right(index.keyframes, before)
