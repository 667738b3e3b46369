"""Cuts the segments of a live session out of the plans of short conversations.

    a new turn      [turns before ⋯ <end>][\\n<user>\\n][slice | repeated]      from the end token, or the first one, on
    the next slice  [ ⋯ <user>\\n][slice before | <1.3 seconds>, slice ]         what comes after the slice before
    a question      [ ⋯ <user>\\n][slice before][question <end> <assistant>]     what comes after the slice before
                    └──────── not taken ────────┘

The chat template writes control tokens at all these places, so the text between them has the tokens that it would have
in one long conversation. Positions of a plan are moved by a constant on each axis, so that they continue those of the
session: on that of time by another one than on the others, where slices of one grid follow their times.

It knows plans only, neither how prompts are written nor the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from gridsieve.common.contract.errors import PeerContract
from gridsieve.common.contract.plan import Grid, Int32Array, PromptPlan, Run
from gridsieve.services.generation.request.encoded_media import MediaItem
from gridsieve.services.generation.request.pruned_prompt import full_indices
from gridsieve.services.generation.request.session import Segment, Session


@dataclass(frozen=True, slots=True, eq=False)
class SliceSegment:
    """A slice's segment. grid: of the slice, t is 1. kept: int32 [K], of its tokens. place: int32 [3], the position of
    its first token in the session. reference: what was last shown of each place; empty: the slice, which is whole.
    settled: whether another slice of the same files keeps nothing."""

    segment: Segment
    grid: Grid
    kept: Int32Array
    place: Int32Array
    reference: bytes = b""
    settled: bool = False


def turn_slice(plan: PromptPlan, item: MediaItem, session: Session, ends: Collection[int]) -> SliceSegment:
    """The first slice of a turn: slice 0 of the plan's video, and what comes before it.

    Of a session that has rows, the plan is one of an earlier turn of each, and this one: the segment begins with the
    token of `ends` that ends the model's turn.
    """
    first = _last_of(plan.input_ids[: plan.media[-1].runs[0].offset], ends, 1) if session.held else 0
    return _slice(plan, item, 0, first, session, _before(session, ends))


def next_slice(plan: PromptPlan, item: MediaItem | None, session: Session, before: SliceSegment) -> SliceSegment:
    """Slice 1 of the plan's video, and the text between it and slice 0, the last slice that the session had.

    item: None: none of slice 1 is kept. before: slice 0.
    """
    _, end = _slice_rows(plan, 0)
    begin, _ = _slice_rows(plan, 1)
    shift = None
    if begin == end:  # no text, whose position follows from what was before
        shift = before.place - plan.positions[:, _slice_rows(plan, 0)[0]]
    made = _slice(plan, item, 1, end, session, (), shift)
    if item is None:
        return replace(made, reference=before.reference, settled=before.settled)
    settled = bool(item.reference) and item.reference == before.reference and not made.kept.size
    return replace(made, reference=item.reference, settled=settled)


def question(plan: PromptPlan, session: Session, ends: Collection[int], transient: bool) -> Segment:
    """A question: what comes after the plan's video, where it has one.

    Else, of a session that has rows, the plan is one of an earlier turn of each, and this one: the segment begins with
    the token of `ends` that ends the model's turn.
    """
    before: tuple[int, ...] = ()
    if plan.media:
        first = _slice_rows(plan, plan.media[-1].grid.t - 1)[1]
    elif session.held:
        first, before = _last_of(plan.input_ids, ends, 2), _before(session, ends)
    else:
        first = 0
    shift = _shift(plan, first, session, before)
    return _cut(plan, first, plan.tokens, session, before, (), shift, keeps_answer=True, transient=transient)


def told(plan: PromptPlan, session: Session, ends: Collection[int]) -> Segment:
    """A question with its answer, of a plan with one more turn: up to the token of `ends` after the answer.

    The last tokens of `ends` are those of the turn after it (1), of the answer (2), of the question (3) and, without
    media, of the model's turn before it (4).
    """
    first = _slice_rows(plan, plan.media[-1].grid.t - 1)[1] if plan.media else 0
    if not plan.media and session.held:
        first = _last_of(plan.input_ids, ends, 4)
    return _cut(plan, first, _last_of(plan.input_ids, ends, 2), session, (), (), _shift(plan, first, session, ()))


def _slice(
    plan: PromptPlan,
    item: MediaItem | None,
    number: int,
    first: int,
    session: Session,
    before: tuple[int, ...],
    shift: Int32Array | None = None,
) -> SliceSegment:
    begin, end = _slice_rows(plan, number)
    shift = _shift(plan, first, session, before) if shift is None else shift
    segment = _cut(plan, first, end, session, before, (item,) if item else (), shift)
    grid, size = plan.media[-1].grid, plan.media[-1].grid.slice_tokens
    kept = np.arange(grid.tokens if item else 0, dtype=np.int32)
    if item and item.kept is not None:
        kept = item.kept
    own = kept[(kept >= number * size) & (kept < (number + 1) * size)] - np.int32(number * size)
    return SliceSegment(segment, Grid(1, grid.h, grid.w), own, plan.positions[:, begin] + shift)


def _cut(
    plan: PromptPlan,
    first: int,
    end: int,
    session: Session,
    before: tuple[int, ...],
    items: Sequence[MediaItem],
    shift: Int32Array,
    *,
    keeps_answer: bool = False,
    transient: bool = False,
) -> Segment:
    """What is kept of rows [first, end) of a plan, after the tokens `before`.

    items: of its media; the others keep nothing. shift: int32 [3], between the plan's positions and the session's.
    """
    stays, is_media = np.ones(plan.tokens, np.bool_), np.zeros(plan.tokens, np.bool_)
    embeds = []
    for media in plan.media:
        stays[full_indices(media)] = False
    for item in items:
        full = full_indices(plan.media[item.media_index])
        kept = full if item.kept is None else full[item.kept]
        stays[kept] = is_media[kept] = True
        embeds.append(item.embeds[:, torch.from_numpy((kept >= first) & (kept < end))])
    taken = first + np.flatnonzero(stays[first:end])
    places = session.next_position + np.arange(len(before), dtype=np.int32)
    return Segment(
        np.concatenate([np.array(before, np.int32), plan.input_ids[taken]]),
        np.concatenate([np.tile(places, (3, 1)), plan.positions[:, taken] + shift[:, None]], axis=1).astype(np.int32),
        max(session.next_position, int((plan.positions[:, first:end] + shift[:, None]).max()) + 1),
        _runs(is_media[taken], len(before)),
        torch.cat(embeds, dim=1) if embeds else None,
        keeps_answer,
        transient,
    )


def _shift(plan: PromptPlan, first: int, session: Session, before: tuple[int, ...]) -> Int32Array:
    """With which row `first`, of text, continues the session's rows and `before`."""
    start = session.next_position + len(before)
    return np.full(3, start - int(plan.positions[0, first]), np.int32)


def _runs(is_media: np.ndarray[tuple[int], np.dtype[np.bool_]], offset: int) -> tuple[Run, ...]:
    borders = np.flatnonzero(np.diff(np.r_[False, is_media, False].astype(np.int8))).tolist()
    return tuple(Run(offset + begin, end - begin) for begin, end in pairwise(borders) if is_media[begin])


def _slice_rows(plan: PromptPlan, number: int) -> tuple[int, int]:
    """The first token of a slice of the plan's last item, and the one after its last."""
    item = plan.media[-1]
    full, size = full_indices(item), item.grid.slice_tokens
    return int(full[number * size]), int(full[(number + 1) * size - 1]) + 1


def _before(session: Session, ends: Collection[int]) -> tuple[int, ...]:
    """The end of the last answer, which was sampled and not computed, but for the token that ends the model's turn."""
    return tuple(token for token in session.unsaid if token not in ends)


def _last_of(ids: Int32Array, ends: Collection[int], count: int) -> int:
    """Where the `count`-th last token of `ends` is. Raises PeerContract if there are not so many."""
    found = np.flatnonzero(np.isin(ids, list(ends)))
    if found.size < count:
        raise PeerContract("the chat template ends turns with none of the checkpoint's end tokens (eos_token_id)")
    return int(found[-count])
