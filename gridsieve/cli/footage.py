"""The frames of a video file or of a camera as JPEG pictures: preprocessing's code chooses, decodes and turns them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import av
from PIL import Image

from gridsieve.cli.terminal import warn
from gridsieve.common.contract.errors import MediaRejected
from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.packets import read_packets
from gridsieve.services.preprocessing.video.pictures import is_picture, read_picture
from gridsieve.services.preprocessing.video.sampling import TICKS_PER_S
from gridsieve.services.preprocessing.video.slices import PlannedVideo
from gridsieve.services.preprocessing.video.stream import Intervals, StreamFrame, opened_frames, stream_frames

_QUALITY = 90
_READ_BYTES = 2**16


def is_camera(source: str) -> bool:
    """Whether a path is that of a device, such as /dev/video0 of Video4Linux."""
    return Path(source).is_char_device()


def pictures(source: str, fps: float) -> Iterator[tuple[float, bytes]]:
    """Yields seconds since the first frame, and the picture, of the first frame of each interval of 1 / fps.

    Of a camera they come as they are filmed.
    Raises MediaRejected for what is no video, MediaDamaged for one of which too much cannot be decoded, OSError for a
    file or a camera that cannot be read.
    """
    first_us: int | None = None
    for frame in _frames(source, fps):
        first_us = frame.time_us if first_us is None else first_us
        file = io.BytesIO()
        Image.fromarray(frame.pixels).save(file, "JPEG", quality=_QUALITY)
        yield (frame.time_us - first_us) / TICKS_PER_S, file.getvalue()


def _frames(source: str, fps: float) -> Iterator[StreamFrame]:
    name = repr(source)  # quoted, so that errors do not take it for a field
    if is_camera(source):
        with av.open(source, "r", format="v4l2") as camera:
            yield from opened_frames(camera, fps, name, turned=False, live=True)
        return
    with Path(source).open("rb", buffering=0) as file:
        if file.seekable():
            yield from _film(Source(name, b"", file.fileno()), fps)
        else:  # a pipe
            yield from stream_frames(lambda: file.read(_READ_BYTES), fps, name)


def _film(source: Source, fps: float) -> Iterator[StreamFrame]:
    if is_picture(source.head) and not read_picture(source).moves:
        raise MediaRejected("is a picture, not a video", field=source.name, remedy="gridsieve ask takes pictures")
    index, intervals = read_packets(source), Intervals(fps)
    if index.missing_frames:
        warn(f"{source.name} was cut off, {index.missing_frames} frames are missing")
    times_us = [round(tick * index.times.time_base * TICKS_PER_S) for tick in index.times.ticks]
    chosen = {place: time_us for place, time_us in enumerate(times_us) if intervals.begins_one(time_us)}
    video = PlannedVideo(source, index, tuple(chosen), slice_frames=1, size_px=(index.height_px, index.width_px))
    for time_us, frame in zip(chosen.values(), video.slices(), strict=True):
        yield StreamFrame(frame.pixels[0], time_us)
