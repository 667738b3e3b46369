"""Checks that a prompt and its answer fit, and suggests a frame_sampling that would fit if they do not.

Tokens are counted from the plan's grids, before any frame is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gridsieve.common.contract.errors import PromptTooLong
from gridsieve.common.contract.plan import Grid, MediaPlan, PromptPlan, Run
from gridsieve.common.contract.retention import ItemPruning, num_kept

# Preprocessing samples at least this many frames of a video, unless the request sets another minimum.
MIN_FRAMES = 4


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """A limit on prompt and answer together, in tokens.

    context_tokens: of a model with one-dimensional positions, which pruning leaves as they are: the prompt before
    pruning and its answer must fit into it. None: of others, whose positions grow more slowly, or which have none.
    """

    tokens: int
    context_tokens: int | None = None

    def answer_tokens(
        self, plan: PromptPlan, prunings: Sequence[ItemPruning], num_kept: Sequence[int], max_new_tokens: int | None
    ) -> int:
        """The maximum number of tokens of the answer, at least 1 if it has one.

        prunings, num_kept: one for each item. max_new_tokens: of the request; None if it sets none, 0 if it has no
        answer.
        Raises PromptTooLong if prompt and answer do not fit, with a frame_sampling that would fit.
        """
        answer = 1 if max_new_tokens is None else max_new_tokens
        # Text between the slices of a video (timestamps) scales with their number, so it is not the caller's text.
        between = sum(_between(item, item.grid.t) for item in _apart(plan.media))
        text = plan.tokens - between - sum(item.grid.tokens for item in plan.media)
        prompt = text + between + sum(num_kept)
        spare = self.tokens - prompt
        if self.context_tokens is not None:
            spare = min(spare, self.context_tokens - plan.tokens)
        if answer <= spare:
            return spare
        wanted = "an answer" if max_new_tokens is None else f"an answer of {answer} tokens"
        limits = [Limit(prunings, self.tokens - text - answer)]
        if self.context_tokens is not None:
            limits.append(Limit([ItemPruning()] * len(plan.media), self.context_tokens - text - answer))
        if self.context_tokens is not None and prompt + answer <= self.tokens:
            raise PromptTooLong(
                f"the prompt has {plan.tokens} tokens before pruning, which keep their positions; with {wanted} it "
                f"exceeds the model's context of {self.context_tokens} tokens",
                value=plan.tokens + answer,
                limit=self.context_tokens,
                remedy=advice(plan.media, limits),
            )
        raise PromptTooLong(
            f"the prompt has {prompt} tokens after pruning, {text} of them text; with {wanted} it exceeds the limit of "
            f"{self.tokens} tokens",
            value=prompt + answer,
            limit=self.tokens,
            remedy=advice(plan.media, limits),
        )


@dataclass(frozen=True, slots=True)
class Limit:
    """How many tokens all media of a prompt may have, each pruned so."""

    prunings: Sequence[ItemPruning]
    tokens: int

    def holds(self, media: Sequence[MediaPlan], size: Callable[[MediaPlan], tuple[int, int]]) -> bool:
        """size: an item's slices and tokens of a slice."""
        tokens = sum(_tokens(item, how, *size(item)) for item, how in zip(media, self.prunings, strict=True))
        return tokens <= self.tokens


def _apart(media: Sequence[MediaPlan]) -> list[MediaPlan]:
    """The items, where a video and its sound have one run each: between their runs are those of the other, no text."""
    apart = list(media)
    for place, (item, after) in enumerate(pairwise(media)):
        if after.runs[0].offset < item.runs[-1].end:
            for each in (place, place + 1):
                apart[each] = replace(media[each], runs=(Run(media[each].runs[0].offset, media[each].grid.tokens),))
    return apart


def advice(media: Sequence[MediaPlan], limits: Sequence[Limit]) -> str | None:
    """The remedy: a frame_sampling that makes the media fit into all limits; None if none does.

    Only decoded media can shrink. The text between their slices counts as theirs. Frames whose tokens do not follow
    their pixels can only become fewer.
    """
    media = _apart(media)
    ways, sized = [], [item for item in media if not item.fixed_tokens]
    if pixels := _max_pixels(media, limits):
        ways.append(f"`frame_sampling.max_pixels` {pixels}")
    if fps := _fps(media, limits):
        present = max((math.prod(item.frames.size_px) for item in sized), default=0)
        ways.append(f"`frame_sampling.fps` {fps}" + (f" and `frame_sampling.max_pixels` {present}" if present else ""))
    return f"{', or '.join(ways)} would fit" if ways else None


def _tokens(item: MediaPlan, pruning: ItemPruning, slices: int, slice_tokens: int) -> int:
    """Prompt tokens of an item after pruning, if it had `slices` slices of `slice_tokens` tokens."""
    return num_kept(Grid(slices, 1, slice_tokens), pruning, item.modality) + _between(item, slices)


def _between(item: MediaPlan, slices: int) -> int:
    """An upper bound on the text tokens between `slices` slices of an item: the sum of its longest gaps, as
    many as the slices have runs.

    That is one gap more than needed, as the last of fewer slices may have a timestamp with one more digit.
    """
    gaps = sorted((after.offset - before.end for before, after in pairwise(item.runs)), reverse=True)
    return sum(gaps[: slices * -(-len(item.runs) // item.grid.t)])


def _max_pixels(media: Sequence[MediaPlan], limits: Sequence[Limit]) -> int | None:
    """The largest number of pixels per frame at which all items fit. Frames are rounded down to whole tokens."""

    def fit(pixels: int) -> bool:
        return all(limit.holds(media, lambda item: (item.grid.t, _slice_tokens(item, pixels))) for limit in limits)

    # A frame never has less than one token.
    sized = [item for item in media if not item.fixed_tokens]
    least = max((_token_px(item) for item in sized), default=1)
    most = max((math.prod(item.frames.size_px) for item in sized), default=0)
    return _largest(least, most, fit)


def _slice_tokens(item: MediaPlan, pixels: int) -> int:
    if item.brings_embeds or item.fixed_tokens:
        return item.grid.slice_tokens
    return max(1, min(item.grid.slice_tokens, pixels // _token_px(item)))


def _token_px(item: MediaPlan) -> int:
    """Pixels of a frame per token, rounded down; 0 without frames."""
    return math.prod(item.frames.size_px) // item.grid.slice_tokens


def _fps(media: Sequence[MediaPlan], limits: Sequence[Limit]) -> float | None:
    """The largest frame rate, in steps of 0.01, at which all items fit at their present frame size."""

    def fit(hundredths: int) -> bool:
        return all(
            limit.holds(media, lambda item: (_slices(item, hundredths), item.grid.slice_tokens)) for limit in limits
        )

    rates = [_frames_per_slice(item) / item.seconds_per_grid for item in media if item.seconds_per_grid]
    found = _largest(1, math.floor(100 * max(rates, default=0)), fit)
    return found and found / 100


def _slices(item: MediaPlan, hundredths: int) -> int:
    """Temporal slices of an item at `hundredths` / 100 frames per second."""
    if item.seconds_per_grid is None or item.brings_embeds:
        return item.grid.t
    frames = max(MIN_FRAMES, math.ceil(item.grid.t * item.seconds_per_grid * hundredths / 100))
    return min(item.grid.t, math.ceil(frames / _frames_per_slice(item)))


def _frames_per_slice(item: MediaPlan) -> int:
    """Groups of frames get smaller with fewer frames, at least to one each."""
    return 1 if item.frames.group_frames else item.slice_frames


def _largest(least: int, most: int, fits: Callable[[int], bool]) -> int | None:
    """Binary search: the largest number in [least, most] that fits, None if none does. `fits` must be monotonic."""
    if least > most or not fits(least):
        return None
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least
