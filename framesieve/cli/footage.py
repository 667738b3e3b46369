"""The frames of a video file or of a camera, as JPEG pictures."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from framesieve.common.contract.errors import MediaRejected

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame

_QUALITY = 90
_TICK_S = 1e-6  # 0.29 · 100 is below 29


def is_camera(source: str) -> bool:
    """Whether a path is that of a device, such as /dev/video0 of Video4Linux."""
    return Path(source).is_char_device()


def pictures(source: str, fps: float) -> Iterator[tuple[float, bytes]]:
    """Yields seconds since the first frame, and the picture, of the first frame of each interval of 1 / fps.

    Of a camera they come as they are filmed. Damaged frames are left out.
    Raises MediaRejected for a file without a video, OSError for one that cannot be read.
    """
    import av  # imported on use: slow, and other commands do not need it

    interval = -1
    origin_s: float | None = None
    try:
        with _opened(source) as container:
            for frame in _decoded(container):
                if frame.pts is None:
                    continue
                origin_s = frame.time if origin_s is None else origin_s
                since_s = frame.time - origin_s
                if (number := math.floor((since_s + _TICK_S) * fps)) > interval:
                    interval = number
                    file = io.BytesIO()
                    upright = frame.to_image().rotate(frame.rotation, expand=True)
                    upright.save(file, "JPEG", quality=_QUALITY)
                    yield since_s, file.getvalue()
    except OSError:
        raise
    except (av.error.FFmpegError, IndexError) as error:  # IndexError: no stream is a video
        raise MediaRejected(f"{source} cannot be read as a video: {error}") from error
    if origin_s is None:
        raise MediaRejected(f"{source} has no frames")


def _decoded(container: InputContainer) -> Iterator[VideoFrame]:
    import av

    for packet in container.demux(video=0):
        with suppress(av.error.InvalidDataError):  # of cameras often the first
            yield from packet.decode()


@contextmanager
def _opened(source: str) -> Iterator[InputContainer]:
    """A file is not opened by its name, which could be an address for FFmpeg."""
    import av

    if is_camera(source):
        with av.open(source, "r", format="v4l2") as container:
            yield container
    else:
        with Path(source).open("rb") as file, av.open(file, "r") as container:
            yield container
