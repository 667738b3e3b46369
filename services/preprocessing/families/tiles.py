"""Images of any resolution, for the families that send them as tiles: the whole picture, then its tiles, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from framesieve.common.anyres import AnyRes
from framesieve.common.checkpoint import Checkpoint
from framesieve.common.contract.errors import InvalidRequest, MediaRejected, StartupError
from framesieve.common.contract.plan import Grid, Modality
from framesieve.services.preprocessing.prompt.layout import ImageLayout
from framesieve.services.preprocessing.prompt.positions import LinearSpan
from framesieve.services.preprocessing.video.resize import MAX_ASPECT_RATIO, View
from framesieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling

# The mean of transformers' classes.
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_ONLY = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3}


def tiled(anyres: AnyRes, newline: int, height_px: int, width_px: int) -> ImageLayout:
    """The layout of an image: the whole, and the tokens of its tiles with a newline, of this id, behind each row."""
    tiles, side = anyres.tiles(height_px, width_px), anyres.tile_px
    views = (
        View(tiles.height_px, tiles.width_px, row * side - tiles.top_px, column * side - tiles.left_px)
        for row in range(tiles.rows)
        for column in range(tiles.columns)
    )
    whole, (rows, columns) = anyres.tile_tokens**2, tiles.shrunk
    row_of_tokens = (LinearSpan(columns), newline)
    grid = Grid(1, 1, whole + rows * columns)
    expansion = (LinearSpan(whole), *row_of_tokens * rows)
    return ImageLayout(side, side, (None, *views), grid, expansion, tile_columns=tiles.columns)


def evenly(total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
    """Evenly spaced indices from the first frame on, as `BaseVideoProcessor.sample_frames` of transformers 5.24 has."""
    wanted = int(total_frames / float(average_rate) * bounds.fps)
    frames = bounds.num_frames or max(1, min(max(wanted, bounds.min_frames), bounds.max_frames, total_frames))
    return tuple(int(index * total_frames / frames) for index in range(min(frames, total_frames)))


def check_aspect(height_px: int, width_px: int) -> None:
    """Raises MediaRejected for an aspect ratio above 200."""
    if max(height_px, width_px) > MAX_ASPECT_RATIO * min(height_px, width_px):
        raise MediaRejected(
            f"has {width_px}×{height_px} pixels, an aspect ratio of at most {MAX_ASPECT_RATIO} is allowed"
        )


def check_fixed(side_px: int, wish: FrameSampling) -> None:
    """Raises InvalidRequest for fewer pixels than every frame has."""
    if wish.max_pixels is not None and wish.max_pixels < side_px**2:
        limit = f"at least {side_px**2}, which this model's frames always have"
        raise InvalidRequest(field="frame_sampling.max_pixels", limit=limit, value=wish.max_pixels)


def check_untiled(tile_columns: int) -> None:
    """Raises InvalidRequest for embeddings of an image whose tokens are not those of one picture after the other."""
    if tile_columns:
        raise InvalidRequest(field="embeds.tile_columns", limit="0 for this model", value=tile_columns)


def check_processors(checkpoint: Checkpoint) -> None:
    """Raises StartupError for settings of the image or the video processor that are not supported."""
    image = checkpoint.processor("image")
    for name, settings in (("image", image), ("video", checkpoint.processor("video") or image)):
        for key, value in _ONLY.items():
            if settings.get(key, value) != value:
                raise StartupError(f"the {name} processor's {key} is {settings[key]}, only {value} is supported")


def background_of(image: Mapping[str, Any]) -> tuple[int, int, int]:
    """The colour, RGB, around pictures that an image processor of these settings pads to squares."""
    red, green, blue = (int(255 * value) for value in image.get("image_mean", _MEAN))
    return red, green, blue


def placeholders_of(checkpoint: Checkpoint) -> Mapping[Modality, str]:
    """The tokens with the config's image_token_index and video_token_index."""
    config: Mapping[str, Any] = checkpoint.config
    added = {token["id"]: str(token["content"]) for token in checkpoint.read_json("tokenizer.json")["added_tokens"]}
    return {
        modality: added.get(config.get(f"{modality.value}_token_index"), f"<{modality.value}>")
        for modality in (Modality.IMAGE, Modality.VIDEO)
    }
