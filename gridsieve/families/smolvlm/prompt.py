"""SmolVLM2: an image as squares and the whole picture, also a square; videos of one square a frame after its time.

    an image    <fake_token_around_image><row_1_col_1> 8 × 8 tokens <fake_token_around_image><row_1_col_2> … newline,
                … newline, <fake_token_around_image><global-img> 8 × 8 tokens of the whole <fake_token_around_image>
    a video     "You are provided the following series of three frames from a 0:00:03 [H:MM:SS] video.", newline,
                newline, "Frame from 00:01:", <fake_token_around_image><global-img> 8 × 8 tokens
                <fake_token_around_image>, newline, "Frame from 00:02:", …, two newlines

Positions are one-dimensional. A picture is resized until its longer side is `size.longest_edge`, then stretched to
whole squares; the whole is made of these. A frame is resized and stretched likewise. The length of a video is that of
its file, also where a request cuts a part out; of embeddings, which have none, the time of the last frame.
Source: `SmolVLMProcessor`, `SmolVLMImageProcessor` and `SmolVLMVideoProcessor` of transformers 5.24; arXiv 2504.05299.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction

import numpy as np

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest, StartupError
from gridsieve.common.contract.plan import FrameShape, Grid, Modality, SizePx
from gridsieve.common.fields import Fields
from gridsieve.families.parts.tiled_images import embedded_rows, tile_views
from gridsieve.services.preprocessing.layouts.family import Family
from gridsieve.services.preprocessing.layouts.processors import check_processors
from gridsieve.services.preprocessing.prompt.control_tokens import named_tokens
from gridsieve.services.preprocessing.prompt.layout import Expansion, ImageLayout
from gridsieve.services.preprocessing.prompt.positions import LinearSpan
from gridsieve.services.preprocessing.video.resize import View, check_aspect
from gridsieve.services.preprocessing.video.sampling import MAX_FRAMES, FrameBounds, FrameSampling
from gridsieve.services.preprocessing.video.timing import TimeBase

_LANCZOS = 1
# The longest side to which transformers resizes.
_MAX_SIDE_PX = 4096
# Of transformers' processor, which takes it for every conversation with a video: the published ones place none.
_VIDEO_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'] is string %}"
    "{{': ' + message['content']}}{% else %}{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}"
    "{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% elif line['type'] == 'video' %}{{ '<video>' }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_UP_TO_19 = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
_UP_TO_19 += " eighteen nineteen"
_TENS = "ten twenty thirty forty fifty sixty seventy eighty ninety"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolVLM(Family):
    """side_px: of every square. tokens: of each. image_px, video_px: the longer side of an image, and of a frame,
    before it is stretched. splits: whether images have squares besides the whole. around, whole: the tokens around
    those of a square, and before those of a whole picture."""

    side_px: int
    tokens: int
    image_px: int
    video_px: int
    splits: bool
    around: str
    whole: str

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> SmolVLM:
        """Raises StartupError for settings that are not supported or contradict each other."""
        config, image = checkpoint.config, checkpoint.processor("image")
        video = checkpoint.processor("video") or image
        sampling = video.part("video_sampling") or video
        vision, names = config.part("vision_config"), named_tokens(checkpoint)
        check_processors(checkpoint, resample=_LANCZOS)
        side_px, token_px = vision.whole("image_size"), vision.whole("patch_size") * config.whole("scale_factor", 2)
        for name, settings in (("image", image), ("video", video)):
            if (found := settings.part("max_image_size").get("longest_edge")) != side_px:
                where = f"the {name} processor's max_image_size.longest_edge"
                raise StartupError(f"{where} is {found}, vision_config's image_size {side_px}")
        tokens, stated = (side_px // token_px) ** 2, checkpoint.read_json("processor_config.json")
        if stated.whole("image_seq_len", 169) != tokens:
            raise StartupError(f"image_seq_len is {stated.get('image_seq_len', 169)}, the tower makes {tokens} tokens")
        pad = names.get("image_token", "<image>")
        return cls(
            placeholders={Modality.IMAGE: pad, Modality.VIDEO: names.get("video_token", "<video>")},
            pad=pad,
            token_px=token_px,
            frame_bounds=FrameBounds(
                fps=sampling.number("fps", 1.0),
                min_frames=1,
                max_frames=sampling.whole("max_frames" if sampling is not video else "num_frames", 64),
                temporal_patch=1,
            ),
            fixed_tokens=True,
            video_template=_VIDEO_TEMPLATE,
            side_px=side_px,
            tokens=tokens,
            image_px=_longest(image, "size"),
            video_px=_longest(sampling, "size" if sampling is video else "video_size"),
            splits=bool(image.get("do_image_splitting", True)),
            around=names.get("fake_image_token", "<fake_token_around_image>"),
            whole=names.get("global_image_token", "<global-img>"),
        )

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """Evenly spaced from the first to the last, of a long video from a second after it to a second before it."""
        rate = float(average_rate)
        length_s, most = total_frames / rate, bounds.max_frames
        wanted = bounds.num_frames or max(1, min(max(round(bounds.fps * length_s), bounds.min_frames), most))
        first, last = 0, total_frames - 1
        if length_s - 2 > most * bounds.fps:
            first, last = int(rate), min(int(total_frames - rate), last)
        if first >= last:
            first, last = 0, total_frames - 1
        return tuple(np.unique(np.linspace(first, last, wanted, dtype=int)).tolist())

    def image(self, height_px: int, width_px: int, wish: FrameSampling, index: int, images: int) -> ImageLayout:
        """The whole picture, and its squares if they are several."""
        check_aspect(height_px, width_px)
        side = self.side_px
        size, first = self.fixed_size((side, side), wish), _scaled(height_px, width_px, self.image_px)
        height, width = _whole_squares(*first, side) if self.splits else size
        rows, columns = height // side, width // side
        if rows == columns == 1:
            view = View(side, side, through=(first,), lanczos=True)
            return ImageLayout(FrameShape(1, size), (view,), self.video_grid(1, *size), self._picture())
        whole = View(side, side, through=(first, (height, width)), lanczos=True)
        squares = tile_views(rows, columns, (side, side), through=(first,), lanczos=True)
        pictures = 1 + rows * columns
        frames = FrameShape(pictures, size, tile_columns=columns)
        return ImageLayout(frames, (whole, *squares), Grid(1, pictures, self.tokens), self._in_squares(rows, columns))

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> SizePx:
        """The size of every frame."""
        check_aspect(height_px, width_px)
        return self.fixed_size((self.side_px, self.side_px), wish)

    def video_view(self, height_px: int, width_px: int, sent_px: SizePx) -> View | None:
        """The whole frame, resized and then stretched."""
        return View(*sent_px, through=(_scaled(height_px, width_px, self.video_px),), lanczos=True)

    def video_grid(self, frames: int, height_px: int, width_px: int) -> Grid:
        """The grid of a video."""
        return Grid(frames, height_px // self.token_px, width_px // self.token_px)

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """An introduction, and for each frame its time and its tokens; of embeddings of an image its tokens.

        Raises InvalidRequest for a grid of other frames, or of too many.
        """
        if grid.slice_tokens != self.tokens:
            limit = f"{self.tokens} tokens a slice"
            raise InvalidRequest(field="embeds.grid", limit=limit, value=grid.slice_tokens)
        if base is None:
            return self._picture()
        if grid.t > MAX_FRAMES:
            raise InvalidRequest(field="embeds.grid.t", limit=f"at most {MAX_FRAMES} for this model", value=grid.t)
        length = timedelta(seconds=int(base.slices_s[-1] if base.length_s is None else base.length_s))
        frames = (
            (f"\nFrame from {int(time_s // 60):02d}:{int(time_s % 60):02d}:", *self._picture())
            for time_s in base.slices_s
        )
        return (
            f"You are provided the following series of {_in_words(grid.t)} frames from a {length} [H:MM:SS] video.\n",
            *(part for each in frames for part in each),
            "\n\n",
        )

    def embedded_image(self, grid: Grid, tile_columns: int, index: int) -> Expansion:
        """As of pixels. Raises InvalidRequest for other squares."""
        if not tile_columns:
            return self.expansion(grid, None)
        return self._in_squares(embedded_rows(grid, tile_columns, self.tokens), tile_columns)

    def _picture(self) -> Expansion:
        """A whole picture."""
        return (f"{self.around}{self.whole}", LinearSpan(self.tokens), self.around)

    def _in_squares(self, rows: int, columns: int) -> Expansion:
        return (*self._squares(rows, columns), "\n", *self._picture())

    def _squares(self, rows: int, columns: int) -> Iterator[str | LinearSpan]:
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                yield f"{self.around}<row_{row}_col_{column}>"
                yield LinearSpan(self.tokens)
            yield "\n"


def _longest(settings: Fields, name: str) -> int:
    """A size of a processor. Raises StartupError for one that is not given by its longest side."""
    longest_px = settings.part(name).whole("longest_edge")
    if longest_px > _MAX_SIDE_PX:
        raise settings.part(name).refusal("longest_edge", f"at most {_MAX_SIDE_PX}")
    return longest_px


def _scaled(height_px: int, width_px: int, longest_px: int) -> SizePx:
    """Height and width with the longer side at `longest_px`, the other one even."""
    aspect = width_px / height_px
    if width_px >= height_px:
        shorter = int(longest_px / aspect)
        return shorter + shorter % 2 or 1, longest_px
    shorter = int(longest_px * aspect)
    return longest_px, shorter + shorter % 2 or 1


def _whole_squares(height_px: int, width_px: int, side_px: int) -> SizePx:
    """Height and width of about this aspect in multiples of a side."""

    def up(length: float) -> int:
        return math.ceil(length / side_px) * side_px

    aspect = width_px / height_px
    if width_px >= height_px:
        return up(int(up(width_px) / aspect)), up(width_px)
    return up(height_px), up(int(up(height_px) * aspect))


def _in_words(number: int) -> str:
    """A number from 1 to 999. Source: num2words, which transformers' processor needs."""
    ones, tens = _UP_TO_19.split(), _TENS.split()
    if number >= 100:
        rest = f" and {_in_words(number % 100)}" if number % 100 else ""
        return f"{ones[number // 100 - 1]} hundred{rest}"
    if number < 20:
        return ones[number - 1]
    return tens[number // 10 - 1] + (f"-{ones[number % 10 - 1]}" if number % 10 else "")
