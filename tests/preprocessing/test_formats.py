"""Every container, codec and pixel format yields the frames and colours that PyAV shows without filters.

transformers reads videos with PyAV too: interlaced fields stay woven, and transparency is dropped.
"""

from __future__ import annotations

import av
import numpy as np
import pytest

from services.preprocessing.sources.source import bytes_source
from services.preprocessing.video.decode import decode_frames
from services.preprocessing.video.packets import read_packets
from tests.preprocessing.preprocessing_media import clip, decoded_in_order, number_of

PLACES = [0, 1, 1, 7, 13, 14, 25, 26, 39, 39]
OPEN_GOPS = {"g": "10", "bf": "3", "x264-params": "open-gop=1:b-adapt=0:scenecut=0"}
HEVC = {"x265-params": "log-level=none:keyint=10:min-keyint=10:bframes=3:open-gop=1"}
VPX = {"auto-alt-ref": "1", "lag-in-frames": "8", "g": "10"}
INTERLACED = {"g": "10", "flags": "+ildct+ilme"}
GOP = {"g": "10"}
AV1 = {"g": "10", "preset": "12", "svtav1-params": "lookahead=8"}


@pytest.mark.parametrize(
    ("container", "codec", "options", "pixel_format", "size"),
    [
        ("mp4", "libx264", OPEN_GOPS, "yuv420p", (48, 64)),
        ("mpegts", "libx264", OPEN_GOPS, "yuv420p", (48, 64)),
        ("flv", "libx264", OPEN_GOPS, "yuv420p", (48, 64)),
        ("mp4", "libx264", GOP, "yuv420p10le", (48, 64)),
        ("mp4", "libx264", GOP, "yuv444p", (49, 65)),
        ("mp4", "libx264", GOP, "gray", (48, 64)),
        ("mov", "libx265", HEVC, "yuv420p", (48, 64)),
        ("webm", "libvpx-vp9", VPX, "yuv420p", (49, 65)),
        ("webm", "libvpx-vp9", {"auto-alt-ref": "0", "g": "10"}, "yuva420p", (48, 64)),
        ("mp4", "libsvtav1", AV1, "yuv420p", (64, 64)),
        ("mp4", "mpeg4", {"g": "10", "bf": "2"}, "yuv420p", (49, 65)),
        ("mpegts", "mpeg2video", INTERLACED, "yuv422p", (48, 64)),
        ("avi", "mjpeg", {}, "yuvj420p", (49, 65)),
        ("mov", "prores_ks", {}, "yuva444p10le", (48, 64)),
        ("matroska", "ffv1", {}, "yuva444p", (49, 65)),
        ("gif", "gif", {}, "rgb8", (49, 65)),
        ("apng", "apng", {}, "rgba", (49, 65)),
        ("h264", "libx264", OPEN_GOPS, "yuv420p", (48, 64)),
    ],
)
def test_frames_equal_those_of_pyav(
    container: str, codec: str, options: dict[str, str], pixel_format: str, size: tuple[int, int]
) -> None:
    try:
        av.Codec(codec, "w")
    except ValueError:
        pytest.skip(f"this build of FFmpeg has no encoder {codec}")
    data = clip(40, 25, container, codec, options, pixel_format=pixel_format, size=size)
    whole = decoded_in_order(data)
    assert len(whole) == 40
    source = bytes_source("video", data)
    for place, frame in zip(PLACES, decode_frames(source, read_packets(source), PLACES), strict=True):
        assert number_of(frame.pixels) == place
        assert not frame.repaired
        assert np.array_equal(frame.pixels, whole[place])
