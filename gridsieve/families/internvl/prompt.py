"""InternVL: an image as tiles of its own shape, then the whole picture; videos of one frame after the other.

    an image    <img>, 16 × 16 tokens of each tile, row by row, and of the whole where there are several, </img>
    a video     Frame1: <img>, 16 × 16 tokens, </img>, newline, Frame2: …

Positions are one-dimensional. Frames are stretched to the tower's size. The video processor's own size is not read:
that of InternVL 3.5's published checkpoints is one of which the tower makes too few tokens, and transformers fails. Nor
does that processor sample frames unless it is asked: here a video has `fps` of its file, else one a second, at most 32,
each from the middle of its share, as the processor's own sampling has them.
Source: `InternVLProcessor`, `InternVLVideoProcessor` and `GotOcr2ImageProcessor` of transformers 5.24; InternVL 2.5,
arXiv 2412.05271.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.plan import FrameShape, Grid, Modality, SizePx
from gridsieve.common.fields import Fields
from gridsieve.families.parts.sampling import count_of
from gridsieve.families.parts.tiled_images import tile_views
from gridsieve.services.preprocessing.layouts.family import Family
from gridsieve.services.preprocessing.layouts.processors import SQUARE, check_processors, size_of
from gridsieve.services.preprocessing.prompt.control_tokens import named_tokens
from gridsieve.services.preprocessing.prompt.layout import Expansion, ImageLayout
from gridsieve.services.preprocessing.prompt.positions import LinearSpan
from gridsieve.services.preprocessing.video.resize import check_aspect
from gridsieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from gridsieve.services.preprocessing.video.timing import TimeBase

_MIN_TILES, _MAX_TILES = 1, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVL(Family):
    """side_px: of every frame. start, end: the tokens around those of a frame or an image. tiles: the fewest and the
    most of an image."""

    side_px: int
    start: str
    end: str
    tiles: tuple[int, int]

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> InternVL:
        config, image = checkpoint.config, checkpoint.processor("image")
        video = checkpoint.processor("video") or image
        vision, names = config.part("vision_config"), named_tokens(checkpoint)
        check_processors(checkpoint, num_frames=None)
        side_px, patch_px = _side(vision, "image_size", 448), _side(vision, "patch_size", 14)
        if [*size_of(image, SQUARE).values()] != [side_px, side_px]:
            raise StartupError(f"the image processor's size is {image.get('size')}, vision_config's {side_px}")
        if (selects := config.get("vision_feature_select_strategy", "default")) != "default":
            raise StartupError(f"vision_feature_select_strategy {selects!r} is not supported, only 'default'")
        context = names.get("context_image_token", "<IMG_CONTEXT>")
        return cls(
            placeholders={Modality.IMAGE: context, Modality.VIDEO: names.get("video_token", "<video>")},
            pad=context,
            token_px=round(patch_px / config.number("downsample_ratio", 0.5)),
            frame_bounds=FrameBounds(fps=video.number("fps", 1.0), min_frames=1, max_frames=32, temporal_patch=1),
            fixed_tokens=True,
            side_px=side_px,
            start=names.get("start_image_token", "<img>"),
            end=names.get("end_image_token", "</img>"),
            tiles=(image.whole("min_patches", _MIN_TILES), image.whole("max_patches", _MAX_TILES)),
        )

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """The middle of each of evenly divided shares."""
        frames = count_of(total_frames, average_rate, bounds)
        return tuple(int((index + 0.5) * total_frames / frames) for index in range(frames))

    def image(self, height_px: int, width_px: int, wish: FrameSampling, index: int, images: int) -> ImageLayout:
        """Its tiles, and the whole picture if they are several."""
        check_aspect(height_px, width_px)
        size = self.video_size(height_px, width_px, 1, wish)
        tokens = self.side_px // self.token_px
        columns, rows = self._tiles(height_px, width_px)
        views = (*tile_views(rows, columns, size), None) if rows * columns > 1 else (None,)
        grid = Grid(1, tokens, tokens) if len(views) == 1 else Grid(1, 1, len(views) * tokens**2)
        return ImageLayout(FrameShape(len(views), size), views, grid, self.expansion(grid, None))

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> SizePx:
        return self.fixed_size((self.side_px, self.side_px), wish)

    def video_grid(self, frames: int, height_px: int, width_px: int) -> Grid:
        side = self.side_px // self.token_px
        return Grid(frames, side, side)

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """For each frame its number and its tokens; of embeddings of an image its tokens."""
        if base is None:
            return (self.start, LinearSpan(grid.tokens), self.end)
        one = LinearSpan(grid.slice_tokens)
        return tuple(
            part
            for number in range(1, grid.t + 1)
            for part in (f"{chr(10) if number > 1 else ''}Frame{number}: {self.start}", one, self.end)
        )

    def _tiles(self, height_px: int, width_px: int) -> tuple[int, int]:
        """Columns and rows nearest to the picture's shape; of several as near, the most of which it fills half."""
        min_tiles, max_tiles = self.tiles
        shapes = [
            (columns, rows)
            for columns in range(1, max_tiles + 1)
            for rows in range(1, max_tiles + 1)
            if min_tiles <= columns * rows <= max_tiles
        ]
        best, best_apart = (1, 1), float("inf")
        for columns, rows in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
            apart = abs(width_px / height_px - columns / rows)
            fills = width_px * height_px > 0.5 * self.side_px**2 * columns * rows
            if apart < best_apart or (apart == best_apart and fills):
                best, best_apart = (columns, rows), apart
        return best


def _side(vision: Fields, name: str, default: int) -> int:
    """A side of vision_config. Raises StartupError for two that differ."""
    if not isinstance(vision.get(name), list):
        return vision.whole(name, default)
    height, width = vision.numbers(name, 2)
    if height != width:
        raise StartupError(f"vision_config.{name} {vision[name]} is not supported, only squares")
    return int(height)
