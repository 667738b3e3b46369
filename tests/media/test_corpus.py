"""What every encoder of the pinned PyAV makes is read: each frame shows its index, at its time.

Plain footage yields the colours of PyAV without filters, bit for bit: transformers reads videos with PyAV too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import av
import numpy as np
import pytest

from gridsieve.services.preprocessing.sources.source import bytes_source
from gridsieve.services.preprocessing.video.decode import decode_frames
from gridsieve.services.preprocessing.video.packets import read_packets
from tests.preprocessing.preprocessing_media import clip, decoded_in_order, number_of

OPEN_GOPS = {"g": "10", "bf": "3", "x264-params": "open-gop=1:b-adapt=0:scenecut=0"}
PYRAMIDS = {"g": "20", "bf": "7", "x264-params": "b-pyramid=normal:b-adapt=0:scenecut=0"}
ONE_KEYFRAME = {"g": "1000", "x264-params": "scenecut=0"}
HEVC = {"x265-params": "log-level=none:keyint=10:min-keyint=10:bframes=3:open-gop=1"}
HEVC_PYRAMIDS = {"x265-params": "log-level=none:keyint=20:min-keyint=20:bframes=7:b-pyramid=1:open-gop=0"}
SUB_LAYERS = {"x265-params": "log-level=none:keyint=20:min-keyint=20:bframes=3:temporal-layers=1:open-gop=0"}
VPX = {"auto-alt-ref": "1", "lag-in-frames": "8", "g": "10"}
INTRA = {"g": "1"}
GOP = {"g": "10"}
B_FRAMES = {"g": "10", "bf": "2"}
AV1 = {"g": "10", "preset": "12", "svtav1-params": "lookahead=8"}


@dataclass(frozen=True)
class Made:
    """A clip of `frames` frames; its muxer keeps times to within `tick_s`."""

    container: str
    codec: str
    options: dict[str, str] = field(default_factory=dict)
    pixel_format: str = "yuv420p"
    size: tuple[int, int] = (48, 64)
    rate: Fraction | int = 25
    frames: int = 40
    tick_s: float = 1e-3

    def __str__(self) -> str:
        return f"{self.container}-{self.codec}-{self.pixel_format}-{self.rate}-{self.frames}"


CORPUS = [
    Made("mp4", "libx264", OPEN_GOPS),
    Made("mpegts", "libx264", OPEN_GOPS),
    Made("h264", "libx264", OPEN_GOPS),
    Made("mpegts", "libx264", PYRAMIDS),
    Made("mp4", "libx264", ONE_KEYFRAME),
    Made("mp4", "libx264", GOP, rate=Fraction(1, 2)),
    Made("mp4", "libx264", GOP, rate=Fraction(30000, 1001)),
    Made("mp4", "libx264", GOP, frames=1),
    Made("mp4", "libx264", GOP, "yuv420p10le"),
    Made("mp4", "libx264", GOP, "yuv444p", (49, 65)),
    Made("mov", "libx265", HEVC),
    Made("mpegts", "libx265", HEVC_PYRAMIDS),
    Made("mp4", "libx265", SUB_LAYERS),
    Made("webm", "libvpx", {"g": "10", "auto-alt-ref": "1", "lag-in-frames": "8"}),
    Made("webm", "libvpx-vp9", VPX, size=(49, 65)),
    Made("mp4", "libsvtav1", AV1, size=(64, 64)),
    Made("mp4", "mpeg4", B_FRAMES, size=(49, 65)),
    Made("mpegts", "mpeg2video", B_FRAMES),
    Made("mpeg", "mpeg2video", B_FRAMES, tick_s=0.1),  # starts at the first keyframe's own time
    Made("mov", "prores_ks", {}, "yuv422p10le"),
    Made("avi", "mjpeg", {}, "yuvj420p", (49, 65)),
    Made("matroska", "ffv1", {}, "yuv444p", (49, 65)),
    Made("gif", "gif", {}, "rgb8", (49, 65), tick_s=0.01),
]


# A container, an encoding or a pixel format of which the others have another combination.
DEEP = [
    Made("flv", "libx264", OPEN_GOPS),
    Made("matroska", "libx264", PYRAMIDS),
    Made("mov", "libx264", INTRA),
    Made("mp4", "libx264", GOP, rate=120),
    Made("mp4", "libx264", GOP, "gray"),
    Made("mp4", "libx265", HEVC_PYRAMIDS, "yuv420p10le"),
    Made("matroska", "libsvtav1", AV1, "yuv420p10le", (64, 64)),
    Made("avi", "mpeg4", GOP),
    Made("matroska", "mjpeg", {}, "yuvj422p"),
    Made("avi", "ffv1", {}, "bgr0"),
]


@pytest.mark.parametrize("made", [*CORPUS, *(pytest.param(each, marks=pytest.mark.deep) for each in DEEP)], ids=str)
def test_every_frame_is_found_at_its_time_with_the_colours_of_pyav(made: Made) -> None:
    try:
        av.Codec(made.codec, "w")
    except ValueError:
        pytest.skip(f"this build of FFmpeg has no encoder {made.codec}")
    data = clip(
        *(made.frames, made.rate, made.container, made.codec, made.options),
        pixel_format=made.pixel_format,
        size=made.size,
    )
    whole = decoded_in_order(data)
    assert len(whole) == made.frames
    source = bytes_source("video", data)
    index = read_packets(source)
    assert (len(index.times.ticks), index.dropped_frames) == (made.frames, 0)
    times = [float(tick * index.times.time_base) for tick in index.times.ticks]
    assert times == pytest.approx([float(place / Fraction(made.rate)) for place in range(made.frames)], abs=made.tick_s)
    for places in (range(made.frames), sorted({*range(0, made.frames, 7), *range(1, made.frames, 13)}), [0, 0]):
        for place, frame in zip(places, decode_frames(source, index, list(places)), strict=True):
            assert number_of(frame.pixels) == place
            assert not frame.repaired
            assert np.array_equal(frame.pixels, whole[place])
