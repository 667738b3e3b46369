"""Decodes videos on an NVIDIA card (NVDEC, by FFmpeg), into the frames that the CPU makes, bit for bit.

    card    NV12, P010 ─▶ YUV420P ─▶ RGB        what swscale makes of NV12 without the step between has other levels
    CPU                   YUV420P ─▶ RGB

A video is given to the card if its codec's standard defines every bit of a frame: MPEG-1, -2, -4 and JPEG leave the
rounding of their transform to the decoder. FFmpeg itself decodes on the CPU what a card does not know, such as a pixel
format. It does so without an error, and `is_hwaccel` does not tell: the codec's pixel format does.
"""

from __future__ import annotations

import ctypes

import av
from av.codec.hwaccel import HWAccel
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from gridsieve.common.contract.errors import StartupError
from gridsieve.services.preprocessing.video.packets import decoder_of, reason_of
from gridsieve.services.preprocessing.video.rgb import HDR

# FFmpeg's own decoders, which hand the bits to the card. AV1 has another one that is preferred: see `decoder_of`.
_EXACT = ("h264", "hevc", "vp8", "vp9")
_PLANAR = {"nv12": "yuv420p", "p010le": "yuv420p10le"}
_LIBRARIES = ("libcuda.so.1", "libnvcuvid.so.1")


class NotOnCard(Exception):
    """The card does not make the frames of this video that the CPU makes."""


class Card:
    """The first card that this process sees. lost: it failed, perhaps for later videos, too: the process should end."""

    def __init__(self) -> None:
        """Raises StartupError without a card, its driver or a library of it."""
        self.lost = False
        self.accelerator = HWAccel("cuda", allow_software_fallback=True, options={"primary_ctx": "1"})
        self._reformatter = VideoReformatter()
        try:
            for library in _LIBRARIES:
                ctypes.CDLL(library)
            # Kept, and with it the card's primary context, which is slow to make: those of all videos share it.
            self._context = av.CodecContext.create("h264", "r", self.accelerator)
        except (OSError, av.FFmpegError) as error:
            text = f"--decoder nvdec: no card can be used: {reason_of(error)}"
            raise StartupError(f"{text}; it needs NVIDIA's driver, in a container its capability video, too") from error

    def decoder_of(self, stream: VideoStream) -> VideoCodecContext:
        """As `packets.decoder_of`, of a stream that was opened with `accelerator`. Raises NotOnCard."""
        codec = decoder_of(stream)
        if codec.name in _EXACT:
            return codec
        # What the container says of the light of an HDR video, a decoder that is made anew does not get.
        if codec.codec.canonical_name != "av1" or codec.color_trc in HDR:
            raise NotOnCard
        made = av.CodecContext.create("av1", "r", self.accelerator)
        assert isinstance(made, VideoCodecContext)
        made.extradata, made.thread_count = codec.extradata, codec.thread_count
        return made

    def planar(self, frame: VideoFrame, codec: VideoCodecContext) -> VideoFrame:
        """The frame in the pixel format in which the CPU makes it. Raises NotOnCard.

        codec: which made the frame, on the card or not. Of a frame that is cropped at the left or the top, FFmpeg does
        so on the CPU alone.
        """
        if codec.pix_fmt != "cuda":
            return frame
        if frame.format.name not in _PLANAR or (frame.width, frame.height) != (codec.width, codec.height):
            raise NotOnCard
        return self._reformatter.reformat(frame, format=_PLANAR[frame.format.name], threads=1)
