"""The item of an image."""

from __future__ import annotations

from dataclasses import replace

from gridsieve.common.contract.plan import FileFacts, Modality
from gridsieve.services.preprocessing.items.item import Item, packed_views, too_large
from gridsieve.services.preprocessing.items.opener import Opened
from gridsieve.services.preprocessing.layouts.family import Family
from gridsieve.services.preprocessing.video.slices import PlannedVideo


def image_item(family: Family, opened: Opened, index: int, images: int) -> Item:
    """The item of an image, the image `index` of so many `images` in the prompt.

    Raises MediaRejected for sides or an aspect ratio that are too large, PromptTooLong for too many tokens, and
    InvalidRequest for a wish that the family cannot fulfil.
    """
    source, picture = opened.source, opened.picture
    assert source is not None
    assert picture is not None
    with too_large():
        laid = family.image(picture.height_px, picture.width_px, opened.request.sampling, index, images)
    picture_px = picture.height_px, picture.width_px
    frames = replace(laid.frames, dtype=family.frame_dtype)
    return Item(
        modality=Modality.IMAGE,
        planned=PlannedVideo(source, picture, (0,), 1, frames.size_px, laid.views, frames.tile_px, frames.dtype),
        frames=frames,
        grid=laid.grid,
        expansion=laid.expansion,
        content=(b"image", source.digest, *packed_views(laid, picture_px)),
        file=FileFacts(source_px=picture_px),
    )
