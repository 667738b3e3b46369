"""Captions of a video as WebVTT and SRT, from moments.

Source: WebVTT: The Web Video Text Tracks Format, W3C, "Syntax". SRT has no standard; players read SubRip's form.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from gridsieve.client.answer import Moment

CaptionFormat: TypeAlias = Literal["vtt", "srt"]
_ESCAPED = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def captions(moments: Iterable[Moment], kind: CaptionFormat) -> str:
    """The text of a file with a caption for each moment, in order. moments: of one video.

    A moment without a description is left out, because a caption needs a text.
    """
    blocks = ["WEBVTT"] if kind == "vtt" else []
    shown = [(each, " ".join(each.description.split())) for each in moments]
    for number, (moment, text) in enumerate([each for each in shown if each[1]], 1):
        if kind == "vtt":
            text = "".join(_ESCAPED.get(one, one) for one in text)
        times = f"{_time(moment.start_s, kind)} --> {_time(moment.end_s, kind)}"
        blocks.append(f"{number}\n{times}\n{text}")
    return "".join(f"{block}\n\n" for block in blocks)


def _time(time_s: float, kind: CaptionFormat) -> str:
    """hh:mm:ss.fff, or with a comma."""
    whole, ms = divmod(round(time_s * 1000), 1000)
    point = "." if kind == "vtt" else ","
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}{point}{ms:03d}"
