"""Positions of MiniCPM-V 4.7, in which the pictures of a frame share one canvas (Canvas M-RoPE).

    text  <image>  whole  </image>  <slice> 0 </slice><slice> 1 </slice> newline <slice> 2 </slice><slice> 3 </slice>

            columns →                    an image of 2 × 2 slices; all its tokens have one position in time, that of
            ┌───────┬───────┐            the canvas' corner. The whole is stretched over the canvas. <image> is
      rows  │   0   │   1   │ newline    one before the corner, </image> one behind the opposite one; <slice> and
        ↓   ├───────┼───────┤            </slice> have the places of a slice's first and last token; a newline is
            │   2   │   3   │            behind the row that it ends
            └───────┴───────┘ </image>

The next text or canvas begins one after the longer side of the canvas. Markers and newlines that follow a frame have
the position of its corner on all three axes, so positions depend on ids behind the media.
Source: `MiniCPMV4_7Model.get_rope_index` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from gridsieve.common.contract.plan import Int32Array


@dataclass(frozen=True, slots=True)
class CanvasSpan:
    """The tokens of a picture. side: their rows and columns. canvas: those of its frame's canvas. corner: the row and
    column of the canvas at which a slice begins; None: it is the whole, which is stretched over the canvas."""

    side: tuple[int, int]
    canvas: tuple[int, int]
    corner: tuple[int, int] | None = None

    @property
    def tokens(self) -> int:
        return self.side[0] * self.side[1]


# A span of a prompt, after the place of its first token.
Placed: TypeAlias = tuple[int, CanvasSpan]


def canvas_positions(input_ids: Int32Array, pictures: Sequence[Placed], markers: Sequence[int]) -> Int32Array:
    """Positions of a prompt: int32 [3, N], the axes time, height, width.

    pictures: of the prompt, in its order; each has a marker before and behind it. markers: the ids that may follow a
    frame without counting as text.
    """
    positions = np.empty((3, input_ids.size), np.int32)
    done = following = 0  # tokens with positions, and the position of the next text or canvas
    is_marker = np.isin(input_ids, markers)
    for frame in _frames(pictures):
        first, end = frame[0][0] - 1, frame[-1][0] + frame[-1][1].tokens
        while end < input_ids.size and is_marker[end]:
            end += 1
        # The marker before a frame that follows another one at once was counted as one behind that.
        text = max(first - done, 0)
        positions[:, done:first] = following + np.arange(text)
        corner = following + text
        positions[:, first:end] = corner
        _place(positions[1:], frame, corner)
        following, done = corner + max(frame[0][1].canvas) + 1, end
    positions[:, done:] = following + np.arange(input_ids.size - done)
    return positions


def _frames(pictures: Sequence[Placed]) -> Iterator[Sequence[Placed]]:
    """The whole of each frame and its slices."""
    begins = [place for place, (_, span) in enumerate(pictures) if span.corner is None]
    for begin, end in zip(begins, [*begins[1:], len(pictures)], strict=True):
        yield pictures[begin:end]


def _place(axes: Int32Array, frame: Sequence[Placed], corner: int) -> None:
    """Sets height and width of a frame's tokens, of the markers around them and of newlines. axes: int32 [2, N]."""
    (start, whole), *slices = frame
    axes[:, start - 1] = max(corner - 1, 0)
    axes[:, start : start + whole.tokens] = corner + _places(whole.side, whole.canvas)
    axes[:, start + whole.tokens] = corner + np.array(whole.canvas)
    for place, (begin, span) in enumerate(slices):
        assert span.corner is not None
        top, left = (corner + side for side in span.corner)
        bottom, right = top + span.side[0] - 1, left + span.side[1] - 1
        end = begin + span.tokens
        axes[:, begin - 1], axes[:, end] = (top, left), (bottom, right)
        axes[:, begin:end] = np.array([[top], [left]]) + _places(span.side, span.side)
        if slices[place + 1 :]:  # a newline between two rows is all that is between two slices besides their markers
            axes[0, end + 1 : slices[place + 1][0] - 1] = bottom
            axes[1, end + 1 : slices[place + 1][0] - 1] = corner + whole.canvas[1]


def _places(side: tuple[int, int], canvas: tuple[int, int]) -> Int32Array:
    """Rows and columns of a grid's tokens that is stretched over a canvas, int32 [2, rows · columns]."""
    axes = np.meshgrid(*(_stretched(*lengths) for lengths in zip(side, canvas, strict=True)), indexing="ij")
    return np.stack([axis.reshape(-1) for axis in axes])


def _stretched(count: int, length: int) -> Int32Array:
    """So many numbers from 0 to length − 1, rounded as `torch.linspace(0, length - 1, count).round()` rounds."""
    places, last = np.arange(count, dtype=np.float32), np.float32(length - 1)
    step = last / np.float32(max(count - 1, 1))
    from_start, from_end = step * places, last - step * places[::-1]
    return np.rint(np.where(places < count // 2 + (count == 1), from_start, from_end)).astype(np.int32)
