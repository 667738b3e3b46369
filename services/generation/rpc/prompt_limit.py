"""Whether a prompt and its answer fit, and if not, what would have.

It counts tokens from the plan's grids alone, before anything is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from common.contract.errors import PromptTooLong
from common.contract.plan import Grid, MediaPlan, PromptPlan
from common.contract.retention import Pruning, retained_count

# Videos are looked at in at least this many frames, unless the request says otherwise.
MIN_FRAMES = 4


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """A limit on prompt and answer together, in tokens."""

    tokens: int

    def room(
        self, plan: PromptPlan, prunings: Sequence[Pruning], kept_counts: Sequence[int], max_new_tokens: int | None
    ) -> int:
        """How many tokens the answer may have at most, at least 1.

        prunings, kept_counts: one for each item. max_new_tokens: what the caller asked for, None if nothing.
        Raises PromptTooLong if that does not fit, naming the frame_sampling that would.
        """
        answer = max_new_tokens or 1
        # What stands between the slices of a video comes and goes with them: it is the media's, not the caller's text.
        between = sum(_between(item, item.grid.t) for item in plan.media)
        text = plan.tokens - between - sum(item.grid.tokens for item in plan.media)
        prompt = text + between + sum(kept_counts)
        if prompt + answer <= self.tokens:
            return self.tokens - prompt
        wanted = f"max_new_tokens of {answer}" if max_new_tokens else "an answer"
        raise PromptTooLong(
            f"the prompt has {prompt} tokens after pruning, {text} of them text; with {wanted} that is more than the "
            f"{self.tokens} tokens that this service takes{advice(plan.media, prunings, self.tokens - text - answer)}"
        )


def advice(media: Sequence[MediaPlan], prunings: Sequence[Pruning], room: int) -> str:
    """What would make the media fit into `room` tokens; empty if nothing would. Only what is decoded can shrink.

    The text between their slices counts as theirs.
    """
    ways = []
    if pixels := _max_pixels(media, prunings, room):
        ways.append(f"max_pixels={pixels}")
    if fps := _fps(media, prunings, room):
        present = max(item.frame_height_px * item.frame_width_px for item in media)
        ways.append(f"fps={fps} and max_pixels={present}")
    return f"; a frame_sampling of {', or '.join(ways)}, would fit" if ways else ""


def _tokens(item: MediaPlan, pruning: Pruning, slices: int, slice_tokens: int) -> int:
    """What an item would take of the prompt after pruning, had it so many slices of so many tokens."""
    return retained_count(Grid(slices, 1, slice_tokens), pruning, item.modality) + _between(item, slices)


def _between(item: MediaPlan, slices: int) -> int:
    """Tokens of text between so many of an item's slices, at most: as many of its gaps, the longest ones.

    That is one gap to spare where they are fewer than now: their last may be shown later, at a time of a digit more.
    """
    gaps = sorted((after.offset - before.end for before, after in pairwise(item.runs)), reverse=True)
    return sum(gaps[:slices])


def _max_pixels(media: Sequence[MediaPlan], prunings: Sequence[Pruning], room: int) -> int | None:
    """The most pixels a frame with which all items fit together. Frames are rounded down to whole tokens."""

    def tokens(pixels: int) -> int:
        return sum(
            _tokens(item, how, item.grid.t, _slice_tokens(item, pixels))
            for item, how in zip(media, prunings, strict=True)
        )

    # Below one token a frame nothing gets smaller.
    least = max((_token_px(item) for item in media), default=1)
    most = max((item.frame_height_px * item.frame_width_px for item in media), default=0)
    return _largest(least, most, lambda pixels: tokens(pixels) <= room)


def _slice_tokens(item: MediaPlan, pixels: int) -> int:
    if item.brings_embeds:
        return item.grid.slice_tokens
    return max(1, min(item.grid.slice_tokens, pixels // _token_px(item)))


def _token_px(item: MediaPlan) -> int:
    """Pixels of a frame that become one token, rounded down; 0 where there are no frames."""
    return item.frame_height_px * item.frame_width_px // item.grid.slice_tokens


def _fps(media: Sequence[MediaPlan], prunings: Sequence[Pruning], room: int) -> float | None:
    """The most frames a second, in hundredths, with which all items fit at the size that their frames have."""

    def tokens(hundredths: int) -> int:
        return sum(
            _tokens(item, how, _slices(item, hundredths), item.grid.slice_tokens)
            for item, how in zip(media, prunings, strict=True)
        )

    rates = [_frames_per_slice(item) / item.seconds_per_grid for item in media if item.seconds_per_grid]
    found = _largest(1, math.floor(100 * max(rates, default=0)), lambda hundredths: tokens(hundredths) <= room)
    return found and found / 100


def _slices(item: MediaPlan, hundredths: int) -> int:
    """Temporal slices at so many hundredths of a frame a second."""
    if item.seconds_per_grid is None or item.brings_embeds:
        return item.grid.t
    frames = max(MIN_FRAMES, math.ceil(item.grid.t * item.seconds_per_grid * hundredths / 100))
    return min(item.grid.t, math.ceil(frames / _frames_per_slice(item)))


def _frames_per_slice(item: MediaPlan) -> int:
    return -(-item.frames // item.grid.t)


def _largest(least: int, most: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number in [least, most] that fits, if those that fit are the smaller ones; None if none does."""
    if least > most or not fits(least):
        return None
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least
