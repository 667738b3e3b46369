"""Whether a decoder that is told to skip frames skips only those to which no other frame refers.

A frame outside AVDISCARD_NONREF is one with a `nal_ref_idc` of 0 (H.264), a B-frame (MPEG-1, -2 and -4), or one that no
frame of its temporal sub-layer refers to (HEVC): frames of higher sub-layers may, so there must be one sub-layer only.
Source: FFmpeg's decoders; ISO/IEC 23008-2, 7.3.2.1 (VPS); ISO/IEC 14496-15, 8.3.3.1 (hvcC).
"""

from __future__ import annotations

from av.video.codeccontext import VideoCodecContext

_CODECS = ("h264", "mpeg1video", "mpeg2video", "mpeg4")
# A NAL unit header of type 32, layer 0, sub-layer 0.
_VPS = b"\x40\x01"
_HVCC_BYTES = 23


def unreferenced_are_skipped(codec: VideoCodecContext) -> bool:
    return codec.name in _CODECS or (codec.name == "hevc" and _has_one_sub_layer(codec.extradata or b""))


def _has_one_sub_layer(extradata: bytes) -> bool:
    """Whether the first VPS says so. extradata: an hvcC box, or NAL units with start codes."""
    is_hvcc = extradata[:1] == b"\1"
    at = extradata.find(_VPS, _HVCC_BYTES if is_hvcc else 0)
    if at < 0 or at + 4 > len(extradata):
        return False
    return extradata[at + 3] >> 1 & 7 == 0
