"""LLaVA 1.5, models in its layout and Mistral 3: images of one frame, which a CLIP, SigLIP or Pixtral tower encodes.

Positions are one-dimensional. The image processor says how a picture becomes a frame:

    shortest_edge, crop_size    resized until its shorter side fits, the centre cut out         CLIP
    height, width               stretched; with do_center_crop the centre is cut out            SigLIP
    longest_edge                shrunk until its longer side fits, sides rounded up to patches  Pixtral

`LlavaImageProcessor` with do_pad pads it to a square first; that of the others means padding of batches.
Mistral 3 merges patches to tokens, whose multiples are then the sides. Pixtral's rows end with [IMG_BREAK], the last
one with [IMG_END].
Source: `LlavaProcessor`, `PixtralProcessor` and the image processors of transformers 5.24; arXiv 2310.03744 and
2410.07073.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.plan import FrameShape, Grid, Modality, SizePx
from gridsieve.common.fields import Fields
from gridsieve.services.preprocessing.layouts.family import Family
from gridsieve.services.preprocessing.layouts.processors import (
    SQUARE,
    background_of,
    check_processors,
    placeholder_of,
    size_of,
)
from gridsieve.services.preprocessing.prompt.layout import Expansion, ImageLayout
from gridsieve.services.preprocessing.prompt.positions import LinearSpan
from gridsieve.services.preprocessing.video.resize import View, centre_view, check_aspect, shrink_to
from gridsieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from gridsieve.services.preprocessing.video.timing import TimeBase

CLIP, SIGLIP, PIXTRAL = "clip_vision_model", "siglip_vision_model", "pixtral"
# Of transformers' classes: sizes, and sides of patches.
_SIZES: Mapping[str, Mapping[str, int]] = {
    CLIP: {"shortest_edge": 224},
    SIGLIP: {"height": 224, "width": 224},
    PIXTRAL: {"longest_edge": 1024},
}
_PATCHES_PX = {CLIP: 32, SIGLIP: 16, PIXTRAL: 16}
_IMAGES_PX = {CLIP: 224, SIGLIP: 224, PIXTRAL: 1024}
_CROP_PX = 224
_DEFAULT, _FULL = "default", "full"
_MERGES = "mistral3"
_PADS_TO_SQUARES = ("LlavaImageProcessor", "LlavaImageProcessorFast", "LlavaImageProcessorPil")
_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Llava(Family):
    """sent_px: height and width of every frame; None: Pixtral's, which follow the picture. shortest_px: of a picture
    before its centre is cut out. stretched_px: height and width to which a picture is stretched before that; None: it
    keeps its shape. longest_px: Pixtral's limit. background: the colour, RGB, around a picture that is padded to a
    square first; None: it is not. more_tokens: tokens of an image besides one for each patch: 1 for a class token, −1
    where the first patch is left out.
    """

    sent_px: SizePx | None
    shortest_px: int | None
    stretched_px: SizePx | None
    longest_px: int
    background: tuple[int, int, int] | None
    more_tokens: int

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Llava:
        config, image = checkpoint.config, checkpoint.processor("image")
        vision = config.part("vision_config")
        tower = str(vision.get("model_type", CLIP))
        if tower not in _SIZES:
            raise StartupError(f"vision_config.model_type {tower!r} is not supported, only {', '.join(_SIZES)}")
        check_processors(checkpoint)
        merges = checkpoint.model_type == _MERGES
        selects = config.get("vision_feature_select_strategy", _FULL if merges else _DEFAULT)
        merge = config.whole("spatial_merge_size", 2) if merges else 1
        size = size_of(image, [*_SIZES[tower]][:1]) or Fields(image.file, _SIZES[tower], "size.")
        crop = size_of(image, SQUARE, "crop_size") or Fields(image.file, dict.fromkeys(SQUARE, _CROP_PX))
        crops = image.get("do_center_crop", tower == CLIP)
        shortest = size.whole("shortest_edge") if crops and "shortest_edge" in size else None
        stretched = _square(size) if {*SQUARE} <= size.keys() else None
        sent = _square(crop) if crops and (shortest or stretched) else stretched
        family = cls(
            placeholders={
                Modality.IMAGE: placeholder_of(checkpoint, Modality.IMAGE, "[IMG]" if tower == PIXTRAL else None)
            },
            token_px=merge * vision.whole("patch_size", _PATCHES_PX[tower]),
            frame_bounds=FrameBounds(fps=1.0, min_frames=1, max_frames=1, temporal_patch=1),
            fixed_tokens=sent is not None,
            sent_px=sent,
            shortest_px=shortest,
            stretched_px=stretched,
            longest_px=size.whole("longest_edge", 0, least=0),
            background=background_of(image) if _pads_to_squares(image, merges) else None,
            more_tokens=(tower == CLIP) - (selects == _DEFAULT),
        )
        family._check(tower, vision.whole("image_size", _IMAGES_PX[tower]), selects)
        return family

    def _check(self, tower: str, image_px: int, selects: str) -> None:
        if selects not in (_DEFAULT, _FULL):
            raise StartupError(
                f"vision_feature_select_strategy {selects!r} is not supported, only {_DEFAULT!r} and {_FULL!r}"
            )
        if tower == PIXTRAL:
            if selects == _DEFAULT or not self.longest_px:
                raise StartupError("a Pixtral tower needs vision_feature_select_strategy full and a size.longest_edge")
        elif self.sent_px != (image_px, image_px):
            raise StartupError(
                f"the image processor makes {self.sent_px} pixels, vision_config.image_size is {image_px}"
            )

    def image_size(self, height_px: int, width_px: int, wish: FrameSampling) -> SizePx:
        """Height and width of the frame that is sent. Raises as `image`."""
        check_aspect(height_px, width_px)
        if self.sent_px is not None:
            return self.fixed_size(self.sent_px, wish)
        ratio = max(height_px, width_px) / self.longest_px
        if ratio > 1:
            height_px, width_px = math.floor(height_px / ratio), math.floor(width_px / ratio)
        rows, columns = -(-height_px // self.token_px), -(-width_px // self.token_px)
        return rows * self.token_px, columns * self.token_px

    def image(self, height_px: int, width_px: int, wish: FrameSampling, index: int, images: int) -> ImageLayout:
        """One frame."""
        size = self.image_size(height_px, width_px, wish)
        if wish.max_pixels is not None and self.sent_px is None:
            size = shrink_to(*size, self.token_px, wish.max_pixels)
        grid = self._grid(*size)
        return ImageLayout(
            FrameShape(1, size), (self._view(height_px, width_px, size),), grid, self.expansion(grid, None)
        )

    def _view(self, height_px: int, width_px: int, sent_px: SizePx) -> View | None:
        squared = self.background if height_px != width_px else None
        if squared:
            height_px = width_px = max(height_px, width_px)
        if self.shortest_px is not None:
            return replace(centre_view(height_px, width_px, self.shortest_px, sent_px), squared=squared)
        if self.stretched_px is None or (squared is None and self.stretched_px == sent_px):
            return None
        height, width = self.stretched_px
        return View(height, width, (height - sent_px[0]) // 2, (width - sent_px[1]) // 2, squared)

    def _grid(self, height_px: int, width_px: int) -> Grid:
        """The grid of patches; a row of all tokens where these are not the patches."""
        rows, columns = height_px // self.token_px, width_px // self.token_px
        return Grid(1, 1, rows * columns + self.more_tokens) if self.more_tokens else Grid(1, rows, columns)

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """One span, or Pixtral's rows."""
        if self.sent_px is not None:
            return (LinearSpan(grid.tokens),)
        row = (LinearSpan(grid.w), _BREAK)
        return (*row * (grid.h - 1), LinearSpan(grid.w), _END)


def _square(size: Fields) -> SizePx:
    return size.whole("height"), size.whole("width")


def _pads_to_squares(image: Mapping[str, Any], merges: bool) -> bool:
    """Files without a type are read by the processor of the model: for LLaVA by `LlavaImageProcessor`."""
    kind = image.get("image_processor_type") or (None if merges else _PADS_TO_SQUARES[0])
    return bool(image.get("do_pad", False)) and kind in _PADS_TO_SQUARES
