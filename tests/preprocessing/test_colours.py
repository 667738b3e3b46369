"""Colours come out as they went in: by the matrix and the range that a video says its values are in."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from av.video.reformatter import ColorRange, Colorspace

from services.preprocessing.sources.source import bytes_source
from services.preprocessing.video.decode import decode_frames
from services.preprocessing.video.packets import read_packets

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
    """Without loss, a frame each, marked with its matrix and range."""
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
def test_a_colour_survives_its_matrix_and_its_range(matrix: Colorspace, full: bool) -> None:
    source = bytes_source("video", clip_of(COLOURS, matrix, full))
    decoded = list(decode_frames(source, read_packets(source), range(len(COLOURS))))
    for frame, colour in zip(decoded, COLOURS, strict=True):
        assert np.abs(frame.pixels.astype(int) - colour).max() <= 3
