"""Converts decoded frames to RGB as a player shows them. Other frames are converted as PyAV does, bit for bit.

interlaced         one field is kept, and the rows between are computed from it
HDR (PQ and HLG)   tone-mapped to BT.709, the colours of other videos
transparent        over white
"""

from __future__ import annotations

from functools import lru_cache

import av
import numpy as np
from av.filter import Graph
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, ColorTrc, VideoReformatter

from gridsieve.common.contract.errors import MediaRejected
from gridsieve.services.preprocessing.video.packets import check_frame_size, reason_of
from gridsieve.services.preprocessing.video.resize import UInt8Array

HDR = (ColorTrc.SMPTE2084, ColorTrc.ARIB_STD_B67)
_UNSPECIFIED_COLORSPACE, _BT2020_NCL = 2, 9


class RgbConverter:
    """Converts the frames of one video, on one thread. name: of the video, for error texts."""

    def __init__(self, name: str) -> None:
        self._name = name
        # `frame.reformat` would start threads for each frame anew, which is ten times as slow on shared cores.
        self._reformatter = VideoReformatter()

    def rgb(self, frame: VideoFrame) -> UInt8Array:
        """uint8 [H, W, 3]. Raises MediaRejected for a frame that is too large or cannot be converted."""
        check_frame_size(self._name, frame.height, frame.width)
        try:
            return self._shown(frame)
        except MemoryError:
            raise
        except (av.FFmpegError, ValueError) as error:
            raise MediaRejected(f"has an unsupported pixel format: {reason_of(error)}", field=self._name) from error

    def _shown(self, frame: VideoFrame) -> UInt8Array:
        if frame.interlaced_frame:
            frame = _deinterlaced(frame)
        if frame.color_trc in HDR:
            return _tone_mapped(frame)
        if any(each.is_alpha for each in frame.format.components):
            return _on_white(self._converted(frame, "rgba"))
        return self._converted(frame, "rgb24")

    def _converted(self, frame: VideoFrame, pixel_format: str) -> UInt8Array:
        converted = self._reformatter.reformat(frame, format=pixel_format, threads=1)
        return converted.to_ndarray().astype(np.uint8, copy=False)


def _deinterlaced(frame: VideoFrame) -> VideoFrame:
    """Interpolates within the frame alone: the frames beside it may not be decoded."""
    graph = _graph(_source(frame), ("estdif", "mode=frame:deint=interlaced"))
    graph.vpush(frame)
    graph.vpush(None)
    return graph.vpull()


def _tone_mapped(frame: VideoFrame) -> UInt8Array:
    graph = _tone_mapping(_source(frame), frame.color_trc, frame.color_primaries)
    try:
        graph.vpush(frame)
        return graph.vpull().to_ndarray().astype(np.uint8, copy=False)
    except BaseException:
        _tone_mapping.cache_clear()
        raise


@lru_cache(maxsize=1)
def _tone_mapping(source: str, transfer: int, primaries: int) -> Graph:
    """Kept from one video to the next: at its first frame swscale computes a table of colours for some seconds."""
    return _graph(source, ("scale", "out_transfer=bt709:out_primaries=bt709:intent=perceptual"), ("format", "rgb24"))


def _source(frame: VideoFrame) -> str:
    """The arguments of a graph's source. Colours that are not declared are those of BT.2020, which HDR is coded in."""
    colorspace = _BT2020_NCL if frame.color_trc in HDR else _UNSPECIFIED_COLORSPACE
    if frame.colorspace != _UNSPECIFIED_COLORSPACE:
        colorspace = frame.colorspace
    return (
        f"width={frame.width}:height={frame.height}:pix_fmt={frame.format.name}:time_base=1/1000:"
        f"colorspace={colorspace}:range={frame.color_range or ColorRange.MPEG}"
    )


def _graph(source: str, *filters: tuple[str, str]) -> Graph:
    graph = Graph()
    graph.threads = 1
    nodes = (graph.add(name, arguments) for name, arguments in (("buffer", source), *filters))
    graph.link_nodes(*nodes, graph.add("buffersink")).configure(auto_buffer=False)
    return graph


def _on_white(pixels: UInt8Array) -> UInt8Array:
    """uint8 [H, W, 4], straight alpha, to uint8 [H, W, 3]."""
    colours, alpha = pixels[..., :3], pixels[..., 3:].astype(np.uint16)
    if alpha.min() == 255:
        return np.ascontiguousarray(colours)
    return ((colours * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
