"""Every container, codec and pixel format yields the frames and colours that PyAV shows without filters.

transformers reads videos with PyAV too: interlaced fields stay woven, and transparency is dropped.
"""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from av.video.reformatter import ColorRange, Colorspace

from services.preprocessing.sources.source import bytes_source
from services.preprocessing.video.decode import DecodedFrame, decode_frames
from services.preprocessing.video.packets import read_packets
from tests.preprocessing.preprocessing_media import clip, decoded_in_order, number_of

FRAMES = 40
PLACES = [0, 1, 1, 7, 13, 14, 25, 26, 39, 39]
OPEN_GOPS = {"g": "10", "bf": "3", "x264-params": "open-gop=1:b-adapt=0:scenecut=0"}
HEVC = {"x265-params": "log-level=none:keyint=10:min-keyint=10:bframes=3:open-gop=0"}
HEVC_OPEN_GOPS = {"x265-params": "log-level=none:keyint=10:min-keyint=10:bframes=3:open-gop=1"}
VPX = {"auto-alt-ref": "1", "lag-in-frames": "8", "g": "10"}
INTERLACED = {"g": "10", "flags": "+ildct+ilme"}
GOP = {"g": "10"}
AV1 = {"g": "10", "preset": "12", "svtav1-params": "lookahead=8"}


def encoded(container: str, codec: str, options: dict[str, str], pixel_format: str, size: tuple[int, int]) -> bytes:
    try:
        av.Codec(codec, "w")
    except ValueError:
        pytest.skip(f"this build of FFmpeg has no encoder {codec}")
    return clip(FRAMES, 25, container, codec, options, pixel_format=pixel_format, size=size)


def frames_at(data: bytes, places: list[int]) -> list[DecodedFrame]:
    source = bytes_source("video", data)
    return list(decode_frames(source, read_packets(source), places))


@pytest.mark.parametrize(
    ("container", "codec", "options", "pixel_format", "size"),
    [
        ("mp4", "libx264", OPEN_GOPS, "yuv420p", (48, 64)),
        ("mpegts", "libx264", OPEN_GOPS, "yuv420p", (48, 64)),
        ("flv", "libx264", OPEN_GOPS, "yuv420p", (48, 64)),
        ("mp4", "libx264", GOP, "yuv420p10le", (48, 64)),
        ("mp4", "libx264", GOP, "yuv444p", (49, 65)),
        ("mp4", "libx264", GOP, "gray", (48, 64)),
        ("mov", "libx265", HEVC_OPEN_GOPS, "yuv420p", (48, 64)),
        ("mp4", "libx265", HEVC, "yuv444p10le", (48, 64)),
        ("webm", "libvpx-vp9", VPX, "yuv420p", (49, 65)),
        ("webm", "libvpx-vp9", {"auto-alt-ref": "0", "g": "10"}, "yuva420p", (48, 64)),
        ("mp4", "libsvtav1", AV1, "yuv420p", (64, 64)),
        ("mp4", "mpeg4", {"g": "10", "bf": "2"}, "yuv420p", (49, 65)),
        ("mpegts", "mpeg2video", INTERLACED, "yuv422p", (48, 64)),
        ("avi", "mjpeg", {}, "yuvj420p", (49, 65)),
        ("flv", "flv", GOP, "yuv420p", (48, 64)),
        ("mov", "prores_ks", {}, "yuva444p10le", (48, 64)),
        ("mov", "qtrle", {}, "argb", (48, 64)),
        ("matroska", "ffv1", {}, "yuva444p", (49, 65)),
        ("gif", "gif", {}, "rgb8", (49, 65)),
        ("apng", "apng", {}, "rgba", (49, 65)),
        ("h264", "libx264", OPEN_GOPS, "yuv420p", (48, 64)),
        ("hevc", "libx265", HEVC, "yuv420p", (48, 64)),
    ],
)
def test_frames_equal_those_of_pyav(
    container: str, codec: str, options: dict[str, str], pixel_format: str, size: tuple[int, int]
) -> None:
    data = encoded(container, codec, options, pixel_format, size)
    whole = decoded_in_order(data)
    assert len(whole) == FRAMES
    frames = frames_at(data, PLACES)
    assert [number_of(frame.pixels) for frame in frames] == PLACES
    assert not any(frame.repaired for frame in frames)
    for place, frame in zip(PLACES, frames, strict=True):
        assert frame.pixels.shape == (*size, 3)
        assert np.array_equal(frame.pixels, whole[place])


# --- colours -----------------------------------------------------------------------------------------------------

COLOURS = [(255, 255, 255), (0, 0, 0), (220, 30, 40), (30, 200, 60), (40, 50, 230), (128, 128, 128), (250, 200, 20)]
# Weights of red and blue in luma. Source: ITU-R BT.601 and BT.709.
WEIGHTS = {Colorspace.ITU601: (0.299, 0.114), Colorspace.ITU709: (0.2126, 0.0722)}


def ycbcr(colour: tuple[int, int, int], matrix: Colorspace, full: bool) -> list[int]:
    """A colour as 8-bit Y, Cb and Cr."""
    red, green, blue = (value / 255 for value in colour)
    of_red, of_blue = WEIGHTS[matrix]
    luma = of_red * red + (1 - of_red - of_blue) * green + of_blue * blue
    cb, cr = (blue - luma) / (2 - 2 * of_blue), (red - luma) / (2 - 2 * of_red)
    if full:
        return [round(255 * luma), *(min(255, round(255 * chroma + 128)) for chroma in (cb, cr))]
    return [round(219 * luma + 16), *(round(224 * chroma + 128) for chroma in (cb, cr))]


def clip_of(colours: list[tuple[int, int, int]], matrix: Colorspace, full: bool) -> bytes:
    """A lossless clip of one frame for each colour, marked with its matrix and range."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        stream = output.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv444p"
        stream.options = {"qp": "0"}
        stream.codec_context.colorspace = matrix
        stream.codec_context.color_range = ColorRange.JPEG if full else ColorRange.MPEG
        for colour in colours:
            planes = [np.full((48, 64), value, np.uint8) for value in ycbcr(colour, matrix, full)]
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.stack(planes), format="yuv444p")))
        output.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize("matrix", WEIGHTS)
@pytest.mark.parametrize("full", [False, True])
def test_colours_follow_the_declared_matrix_and_range(matrix: Colorspace, full: bool) -> None:
    source = bytes_source("video", clip_of(COLOURS, matrix, full))
    decoded = list(decode_frames(source, read_packets(source), range(len(COLOURS))))
    for frame, colour in zip(decoded, COLOURS, strict=True):
        assert np.abs(frame.pixels.astype(int) - colour).max() <= 3
