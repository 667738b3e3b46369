"""A media item between opening and layout: what is sent of it, its grid and expansion, what its tokens depend on."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import TypeAlias

from gridsieve.common.contract.errors import MediaRejected, PromptTooLong
from gridsieve.common.contract.plan import MAX_FRAME_SIDE_PX, FileFacts, FrameShape, Grid, Modality, SizePx
from gridsieve.services.preprocessing.prompt.layout import Expansion, ImageLayout
from gridsieve.services.preprocessing.sound.planned import PlannedSound
from gridsieve.services.preprocessing.video.slices import PlannedEmbeds, PlannedVideo
from gridsieve.services.preprocessing.video.timing import TimeBase

PlannedMedia: TypeAlias = PlannedVideo | PlannedSound | PlannedEmbeds


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """content: everything that the tokens of the item depend on, but the checkpoint. expansion: None for the sound of a
    video, whose expansion has its parts. file: what only the file tells. The other fields are those of `MediaPlan`."""

    modality: Modality
    planned: PlannedMedia
    frames: FrameShape
    grid: Grid
    expansion: Expansion | None
    content: tuple[bytes, ...]
    base: TimeBase | None = None
    timestamps_s: tuple[float, ...] = ()
    file: FileFacts = field(default=FileFacts())
    heard_s: float = 0.0
    sampling_mode: str = ""


@contextmanager
def too_large() -> Iterator[None]:
    """Raises PromptTooLong for a grid that is too large."""
    try:
        yield
    except ValueError as error:
        raise PromptTooLong(f"is too large: {error}") from error


def packed_views(laid: ImageLayout, source_px: SizePx) -> list[bytes]:
    """How each picture of a frame is sent, as bytes, different for different ways.

    source_px: of frames before they are resized. Raises MediaRejected where a resized side is too long.
    """
    packed = []
    for number, view in enumerate(laid.views):
        size_px = laid.frames.frame_px(number)
        if max(size_px) > MAX_FRAME_SIDE_PX:
            raise MediaRejected(
                f"has {source_px[1]}×{source_px[0]} pixels, and would be resized to {size_px[1]}×{size_px[0]}; at most "
                f"{MAX_FRAME_SIDE_PX} are allowed on a side",
                remedy="lower `frame_sampling.max_pixels`",
            )
        packed.append(repr((size_px, view and astuple(view))).encode())
    return packed


def packed_base(base: TimeBase | None) -> bytes:
    """A time base as bytes, different for different time bases."""
    if base is None:
        return b""
    starts = str(base.starts_s).encode() if base.starts_s else b""
    return str(base.seconds_per_grid).encode() + struct.pack(f"<{len(base.slices_s)}d", *base.slices_s) + starts
