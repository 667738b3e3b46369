"""How many frames a video's container promises that the file does not hold: a download or a recording was cut off.

    MP4, MOV        samples of the index that end beyond the file
    AVI             frames that fit between the last one and the header's number of them, if a list ends beyond the file
    Matroska, FLV   frames that fit between the last one and the header's duration

Other containers promise nothing. A hostile file can promise anything: the number only decides whether it is refused.
"""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction

import av
from av.container import InputContainer
from av.video.stream import VideoStream

from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.sampling import FrameTimes

MAX_MISSING = 2**31 - 1
# Durations in headers are rounded, and may include the tail of the sound.
_TOLERANCE_S = Fraction(1, 2)
_MICROSECONDS = 1_000_000
_MAX_LISTS = 1000


def missing_frames(
    source: Source, container: InputContainer, stream: VideoStream, times: FrameTimes, last_s: Fraction
) -> int:
    """Frames that are promised and missing, at most MAX_MISSING. All packets of the stream have been read.

    times: of the frames that were found. last_s: the end of the last one, in the container's time.
    """
    match container.format.name.split(","):
        case ["mov", *_]:
            size_bytes = container.size  # FFmpeg asks the file each time
            missing = sum(each.pos + each.size > size_bytes for each in stream.index_entries)
        case ["avi"]:
            # The header counts pauses, too: frames that are not stored. They may also end a whole file.
            promised_s = stream.frames * (stream.time_base or 0) if _is_cut(source, container.size) else Fraction(0)
            missing = _within(promised_s - last_s, times)
        case ["matroska", *_] | ["flv"]:
            gap_s = _promised_s(container, stream, last_s) - last_s
            missing = _within(gap_s, times) if gap_s > _TOLERANCE_S else 0
        case _:
            missing = 0
    return min(max(0, missing), MAX_MISSING)


def _within(gap_s: Fraction, times: FrameTimes) -> int:
    """How many frames fit into a gap."""
    return round(gap_s * len(times.ticks) / times.length_s)


def _is_cut(source: Source, size_bytes: int) -> bool:
    """Whether one of an AVI's outer lists, of about a gigabyte each, ends beyond the file."""
    end = 0
    with source.open() as file:
        for _ in range(_MAX_LISTS):
            file.seek(end)
            header = file.read(8)
            if header[:4] != b"RIFF":
                break
            end += 8 + int.from_bytes(header[4:], "little")
    return end > size_bytes


def _promised_s(container: InputContainer, stream: VideoStream, last_s: Fraction) -> Fraction:
    """When the stream should end. A container's duration counts only if none of its other streams lasts that long."""
    own_s = tagged_duration_s(stream)
    if own_s is not None:
        return own_s
    promised_s = Fraction(container.duration or 0, _MICROSECONDS)
    if promised_s - last_s > _TOLERANCE_S and _ends_s(container) >= promised_s - _TOLERANCE_S:
        return last_s
    return promised_s


def tagged_duration_s(stream: VideoStream) -> Fraction | None:
    """Seconds of Matroska's tag of a stream, such as "00:01:02.500000000"; None without one."""
    parts = stream.metadata.get("DURATION", "").split(":")
    if len(parts) != 3 or not all(part.replace(".", "", 1).isdecimal() for part in parts):
        return None
    hours, minutes, seconds = map(Fraction, parts)
    return 3600 * hours + 60 * minutes + seconds


def _ends_s(container: InputContainer) -> Fraction:
    """The end of the last packet of any stream. Reads the container once more."""
    last_s = Fraction(0)
    with suppress(av.FFmpegError, IndexError):
        container.seek(0)
        for packet in container.demux():
            if packet.pts is not None and packet.time_base is not None:
                last_s = max(last_s, (packet.pts + (packet.duration or 0)) * packet.time_base)
    return last_s
