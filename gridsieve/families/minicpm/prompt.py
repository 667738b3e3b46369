"""MiniCPM-V 2.5 to 4.5: an image as a source picture and slices of its own resolution; videos of one picture a frame,
or of one a group of frames (4.5).

    an image    <image_id>0</image_id><image>64 queries</image><slice>64 queries</slice>…  newline after each row
    2.5         <image>96 queries</image><slice><image>96 queries</image>… newline … </slice>
    a video     <image>64 queries</image>, newline, <image>64 queries</image> … each with its slices where a request
                asks for them (2.6 and 4.0)
    4.5         the same for each group of up to three consecutive frames, or more where a request asks for more frames

Positions are one-dimensional. Every picture becomes as many tokens as the resampler has queries, whatever its size.
Pictures keep their aspect; sides are multiples of a patch. The chat template gets text alone: the parts of a message
are joined by newlines.
Source: the published processors of openbmb/MiniCPM-Llama3-V-2_5, MiniCPM-V-2_6, MiniCPM-V-4 and MiniCPM-V-4_5,
and their READMEs for videos; LLaVA-UHD, arXiv 2403.11703; MiniCPM-V, arXiv 2408.01800.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest, StartupError
from gridsieve.common.contract.plan import Grid, Modality, SizePx
from gridsieve.families.minicpm.slicing import Slicing
from gridsieve.families.minicpm.versions import queries_of, version_of
from gridsieve.families.parts.tiled_images import embedded_rows
from gridsieve.services.preprocessing.layouts.family import Family
from gridsieve.services.preprocessing.prompt.layout import Expansion, ImageLayout
from gridsieve.services.preprocessing.prompt.positions import LinearSpan
from gridsieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from gridsieve.services.preprocessing.video.timing import TimeBase

# Of media in the rendered conversation: control tokens that no expansion holds.
_STAND_INS = {Modality.IMAGE: "<ref>", Modality.VIDEO: "</ref>"}
# 4.5 samples so many frames a second, of a longer video in so many groups of so many frames.
_FPS, _MAX_GROUPS, _MAX_IN_GROUP = 3, 180, 3
# The published `chat` of 4.5 passes these to the template by default.
_WITHOUT_THINKING = {"enable_thinking": False}


def group_frames(frames: int, length_s: Fraction) -> int:
    """How many frames are in each group: 1 as long as 180 groups hold the frames of 3 a second, at most 3 then.

    Of other numbers of frames, as many as 180 groups need.
    """
    group = 1
    if _FPS * int(length_s) > _MAX_GROUPS:
        group = min(math.ceil(length_s * _FPS / _MAX_GROUPS), _MAX_IN_GROUP)
    as_published = frames == min(round(length_s * _FPS), _MAX_GROUPS * _MAX_IN_GROUP)
    return group if as_published else -(-frames // _MAX_GROUPS)


_ONE_BY_ONE = FrameBounds(fps=1.0, min_frames=1, max_frames=64, temporal_patch=1)
_IN_GROUPS = FrameBounds(_FPS, 1, _MAX_GROUPS * _MAX_IN_GROUP, temporal_patch=1, group_frames=group_frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCPMV(Family):
    """queries: tokens of each picture. slicing: of images. numbers_images: whether each has its number before it.
    wraps_slices: all slices are between one pair of markers, each as a picture of its own (2.5). names: of the markers.
    """

    queries: int
    slicing: Slicing
    numbers_images: bool
    wraps_slices: bool
    names: Mapping[str, str]

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> MiniCPMV:
        """Raises StartupError for a version or settings that are not supported."""
        config, image = checkpoint.config, checkpoint.processor("image")
        version, queries = version_of(config), queries_of(config)
        slices = config.part("slice_config")
        patch_px, most, scale_px = (
            (slices if name in slices else image).whole(name, default)
            for name, default in (("patch_size", 14), ("max_slice_nums", 9), ("scale_resolution", 448))
        )
        sliced = slices.get("slice_mode", image.get("slice_mode", config.get("slice_mode", True)))
        if image.get("image_feature_size", queries) != queries:
            raise StartupError(
                f"the image processor counts {image['image_feature_size']} tokens, query_num is {queries}"
            )
        names = {
            name: str(image.get(name, default))
            for name, default in (
                ("im_start", "<image>"),
                ("im_end", "</image>"),
                ("slice_start", "<slice>"),
                ("slice_end", "</slice>"),
                ("im_id_start", "<image_id>"),
                ("im_id_end", "</image_id>"),
                ("unk", "<unk>"),
            )
        }
        takes_videos = version != "2.5"
        return cls(
            token_px=patch_px,
            queries=queries,
            slicing=Slicing(scale_px, most if sliced else 1, patch_px),
            numbers_images=takes_videos and bool(image.get("use_image_id", config.get("use_image_id", True))),
            wraps_slices=not takes_videos,
            frame_bounds=_IN_GROUPS if version == "4.5" else _ONE_BY_ONE,
            names=names,
            takes_max_slices=True,
            # A picture of any size becomes as many tokens; fewer pixels make an image fewer slices.
            fixed_tokens=True,
            joins_parts="\n",
            pad=names["unk"],
            placeholders=_STAND_INS if takes_videos else {Modality.IMAGE: _STAND_INS[Modality.IMAGE]},
            template_options=_WITHOUT_THINKING if version == "4.5" else {},
        )

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """A frame of each so many; the middles of even shares where that would be too many, and in groups always.

        In groups, all frames of a video of less than one in two seconds (the published code selects none).
        """
        if bounds.group_frames and not bounds.num_frames:
            rate = round(average_rate) or float(average_rate)
            wanted = round(min(bounds.fps, rate) * total_frames / float(average_rate))
            wanted = min(max(wanted, bounds.min_frames, 1), bounds.max_frames, total_frames)
            return _middles(total_frames, wanted)
        step = max(1, round(float(average_rate) / bounds.fps))
        indices = range(0, total_frames, step)
        wanted = bounds.num_frames or min(max(len(indices), bounds.min_frames), bounds.max_frames, total_frames)
        if wanted == len(indices) and not bounds.num_frames:
            return tuple(indices)
        among = range(total_frames) if bounds.num_frames or wanted > len(indices) else indices
        return tuple(among[place] for place in _middles(len(among), wanted))

    def image(self, height_px: int, width_px: int, wish: FrameSampling, index: int, images: int) -> ImageLayout:
        """The source picture, and its slices. Raises MediaRejected for an aspect ratio above 200."""
        sliced = self._slicing(wish).of(height_px, width_px, wish.max_pixels)
        expansion = tuple(self._picture(index))
        if sliced.slices:
            expansion += tuple(self._rows(sliced.columns, sliced.rows))
        grid = Grid(1, 1 + sliced.slices, self.queries)
        return ImageLayout(sliced.frames, sliced.views, grid, expansion)

    def sliced_video(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> ImageLayout | None:
        """As so many images without numbers, joined by newlines."""
        slicing = self._slicing(wish) if wish.max_slices is not None else replace(self.slicing, max_slices=1)
        if slicing.max_slices > 1 and self.frame_bounds.group_frames:
            limit = "1 for videos of this model, whose frames are in groups"
            raise InvalidRequest(field="frame_sampling.max_slices", limit=limit, value=wish.max_slices)
        sliced = slicing.of(height_px, width_px, wish.max_pixels)
        if not sliced.slices:
            return None
        one = (*self._marked("im"), *self._rows(sliced.columns, sliced.rows))
        return ImageLayout(
            replace(sliced.frames, count=frames * sliced.frames.count),
            sliced.views,
            Grid(frames, 1 + sliced.slices, self.queries),
            (*one, *("\n", *one) * (frames - 1)),
        )

    def _slicing(self, wish: FrameSampling) -> Slicing:
        most = self.slicing.max_slices
        if wish.max_slices is not None and not 1 <= wish.max_slices <= most:
            limit = f"between 1 and {most}, max_slice_nums of the checkpoint"
            raise InvalidRequest(field="frame_sampling.max_slices", limit=limit, value=wish.max_slices)
        return replace(self.slicing, max_slices=wish.max_slices or most)

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> SizePx:
        """As of an image without slices."""
        return replace(self.slicing, max_slices=1).of(height_px, width_px).source

    def video_grid(self, frames: int, height_px: int, width_px: int) -> Grid:
        """The grid of a video: a row of queries for each frame, or group of frames."""
        return Grid(frames, 1, self.queries)

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """Each frame or group between its markers. Raises InvalidRequest for a grid of anything else."""
        if grid.w != self.queries:
            limit = f"{self.queries}, the tokens of each picture or group"
            raise InvalidRequest(field="embeds.grid.w", limit=limit, value=grid.w)
        if grid.h != 1:
            raise InvalidRequest(f"of a video must be 1 for this model, got {grid.h}", field="embeds.grid.h")
        one = tuple(self._marked("im"))
        return (*one, *("\n", *one) * (grid.t - 1))

    def embedded_image(self, grid: Grid, tile_columns: int, index: int) -> Expansion:
        """As of pixels: a row of queries for each picture. Raises InvalidRequest for other grids and slices."""
        rows = embedded_rows(grid, tile_columns, self.queries)
        if grid.h - 1 > self.slicing.max_slices:
            limit = f"at most {1 + self.slicing.max_slices}, the source picture and its slices"
            raise InvalidRequest(field="embeds.grid.h", limit=limit, value=grid.h)
        return (*self._picture(index), *(self._rows(tile_columns, rows) if rows else ()))

    def _picture(self, index: int) -> Iterator[str | LinearSpan]:
        names = self.names
        if self.numbers_images:
            yield f"{names['im_id_start']}{index}{names['im_id_end']}"
        yield from self._marked("im")

    def _marked(self, kind: str) -> Iterator[str | LinearSpan]:
        """A picture between its markers. kind: "im" or "slice"."""
        yield from (self.names[f"{kind}_start"], LinearSpan(self.queries), self.names[f"{kind}_end"])

    def _rows(self, columns: int, rows: int) -> Iterator[str | LinearSpan]:
        names, kind = self.names, "im" if self.wraps_slices else "slice"
        if self.wraps_slices:
            yield names["slice_start"]
        for row in range(rows):
            if row:
                yield "\n"
            for _ in range(columns):
                yield from self._marked(kind)
        if self.wraps_slices:
            yield names["slice_end"]


def _middles(total: int, wanted: int) -> tuple[int, ...]:
    share = total / wanted
    return tuple(int(number * share + share / 2) for number in range(wanted))
