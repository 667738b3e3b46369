"""The only position formula of the system: positions of the full, unpruned prompt.

All later stages gather or slice these positions; only decoded tokens add `index + delta`, which continues them.
It knows no model family: a family describes its prompt as spans.

Pictures and sound of a clip count positions from one start, and their parts take turns by time:

    tokens       <bos> <bos> │ pictures │ sound │ pictures │ sound │ sound │ <eos> <eos> │ text
    positions      s−1   s−1 │ s … in the first two seconds │ … the next two │ …  e     e    e+1 …
                             └ of the pictures (s + time, s + row, s + column), of the sound s + number

What follows begins after the greatest position of the last part, even where a part before it reached further.
Source: Qwen2-VL, arXiv 2409.12191, section 2.1; time scaled by seconds as in Qwen2.5-VL, arXiv 2502.13923; clips with
their sound as in `get_rope_index` of transformers 5.24's Qwen2.5-Omni, arXiv 2503.20215.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gridsieve.common.contract.errors import PromptTooLong
from gridsieve.common.contract.plan import MAX_POSITION, Grid, Int32Array

Int64Array: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TextSpan:
    """`tokens` text tokens, whose positions count up on all three axes."""

    tokens: int


@dataclass(frozen=True, slots=True)
class GridSpan:
    """A grid of media tokens whose temporal slices are `time_step` positions apart (an image: 0).

    times: the position of each slice from the span's start, in place of a step; not decreasing, the first is 0.
    """

    grid: Grid
    time_step: Fraction
    times: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return self.grid.tokens


@dataclass(frozen=True, slots=True)
class LinearSpan:
    """`tokens` media tokens of a model with one-dimensional positions, which count up as those of text."""

    tokens: int


MediaSpan: TypeAlias = GridSpan | LinearSpan


@dataclass(frozen=True, slots=True)
class PartSpan:
    """Tokens [begin, end) of a clip's pictures (a grid) or of its sound (linear), which share their start with the
    other parts of the clip. begins: it is the first of them."""

    whole: MediaSpan
    begin: int
    end: int
    begins: bool

    @property
    def tokens(self) -> int:
        return self.end - self.begin

    @property
    def of_sound(self) -> bool:
        return isinstance(self.whole, LinearSpan)


@dataclass(frozen=True, slots=True)
class SharedSpan:
    """A text token that has the position of the token before it, or of the token behind it."""

    before: bool
    tokens: int = 1


Span: TypeAlias = TextSpan | SharedSpan | MediaSpan | PartSpan


def clip_parts(pictures: GridSpan, sound: LinearSpan, chunk: int) -> tuple[PartSpan, ...]:
    """Pictures and sound of a clip in turns: those of the first `chunk` positions of time, of the next, and so on.

    As in transformers, at a jump in time of several chunks a part for each of these is a single token.
    """
    cuts = [[(span, *cut) for cut in _chunks(_places(span)[0], chunk)] for span in (pictures, sound)]
    parts = [part for together in zip_longest(*cuts) for part in together if part]
    return tuple(PartSpan(span, begin, end, number == 0) for number, (span, begin, end) in enumerate(parts))


def slice_parts(pictures: GridSpan, sound: LinearSpan) -> tuple[PartSpan, ...]:
    """Pictures and sound of a clip in turns: each slice of the pictures before the first token of the sound whose
    number is not below the slice's time. The first slice is before the sound."""
    step, tokens, heard, shown = pictures.time_step, pictures.grid.slice_tokens, 0, 0
    parts: list[tuple[MediaSpan, int, int]] = []
    for each in range(1, pictures.grid.t):
        # Not the slice's position, which is the number below its time.
        before = min(sound.tokens, -(-each * step.numerator // step.denominator))
        if before > heard:
            parts += ((pictures, shown * tokens, each * tokens), (sound, heard, before))
            shown, heard = each, before
    parts.append((pictures, shown * tokens, pictures.tokens))
    if heard < sound.tokens:
        parts.append((sound, heard, sound.tokens))
    return tuple(PartSpan(*part, number == 0) for number, part in enumerate(parts))


def _chunks(times: Int64Array, chunk: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each part of tokens at these times, which do not decrease."""
    begin, following = 0, chunk
    while (end := max(begin + 1, int(np.searchsorted(times, following)))) < times.size:
        yield begin, end
        begin, following = end, following + chunk
    yield begin, times.size


def positions_of(spans: Sequence[Span]) -> Int32Array:
    """Positions of a prompt laid out as `spans`: int32 [3, N], the axes time, height, width.

    A span that starts at p = (maximum over all axes of the span before it) + 1 puts token (i, j, k) of a grid at
    (p + ⌊i · time_step⌋, p + j, p + k), or (p + times[i], p + j, p + k), and token n of another span at p + n on every
    axis. All parts of a clip start where the first of them starts.
    Raises PromptTooLong where videos last so long that a position would pass MAX_POSITION.
    """
    parts: list[Int32Array] = []
    start = clip_start = 0
    of_clip: dict[MediaSpan, Int64Array] = {}  # pictures and sound of the clip whose parts are laid out
    for span in spans:
        if not span.tokens:
            continue
        if isinstance(span, SharedSpan):
            parts.append(np.full((3, 1), max(0, start - span.before), np.int32))
            continue
        at = start
        if isinstance(span, PartSpan):
            if span.begins:
                clip_start, of_clip = start, {}
            at = clip_start
            if span.whole not in of_clip:
                of_clip[span.whole] = _places(span.whole)
            part = of_clip[span.whole][:, span.begin : span.end]
        else:
            part = _places(span)
        last = at + int(part.max())
        if last > MAX_POSITION:
            raise PromptTooLong(f"the prompt's videos reach position {last}, at most {MAX_POSITION} is allowed")
        parts.append((part + at).astype(np.int32))
        start = last + 1
    return np.concatenate(parts, axis=1) if parts else np.zeros((3, 0), np.int32)


def _places(span: TextSpan | MediaSpan) -> Int64Array:
    """Positions of a span's tokens from its start, [3, n]."""
    return _grid(span) if isinstance(span, GridSpan) else np.broadcast_to(np.arange(span.tokens), (3, span.tokens))


def _grid(span: GridSpan) -> Int64Array:
    t, h, w = span.grid.t, span.grid.h, span.grid.w
    step = span.time_step
    # Integer arithmetic: in floating point some products land just below an integer and floor one lower.
    steps = span.times or [i * step.numerator // step.denominator for i in range(t)]
    time = np.array(steps, np.int64)
    axes = np.meshgrid(time, np.arange(h), np.arange(w), indexing="ij")
    return np.stack([axis.reshape(-1) for axis in axes])
