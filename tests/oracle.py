"""The formulas of the law, written a second time, plainly and slowly, as the reference of its tests.

Nothing here imports the services. Loops over single tokens are intended: they read like the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


@dataclass(frozen=True)
class Text:
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Item:
    """An image (time_step None) or a video: its grid, merged embeddings [t·h·w, D] and pruning.

    deepstack: further levels of each token, [t·h·w, D] each.
    texts: of an item of several runs, or with text of its own: what is before each run and after the last one, some of
        it empty. Runs are of equal size, and of positions on three axes whole slices.
    linear: its positions count up as those of text.
    bounded: num_kept is the largest number that may be kept, which is known only when it arrives.
    """

    t: int
    h: int
    w: int
    time_step: Fraction | None
    embeds: NDArray[np.float32]
    rate: float = 0.0
    method: str = "evs"
    deepstack: tuple[NDArray[np.float32], ...] = ()
    texts: tuple[Text, ...] = ()
    linear: bool = False
    bounded: bool = False

    @property
    def tokens(self) -> int:
        return self.t * self.h * self.w

    @property
    def runs(self) -> int:
        return max(1, len(self.texts) - 1)

    @property
    def num_kept(self) -> int:
        if self.time_step is None or self.method == "none":
            return self.tokens
        share = 1 - Fraction(str(self.rate))
        if self.method == "evs_causal":
            return self.h * self.w + (self.t - 1) * max(1, math.floor(self.h * self.w * share))
        floor = self.t if self.method in ("vidcom2", "vcast") else self.h * self.w
        return max(floor, math.floor(self.tokens * share))


@dataclass(frozen=True)
class Clip:
    """A video and its sound, a linear item. Their tokens take turns every `chunk` positions of time, from one start.

    begin, end: ids of the text tokens around them, which have the positions of the tokens before and behind these.
    """

    video: Item
    sound: Item
    chunk: int
    begin: int
    end: int


Part: TypeAlias = Text | Item | Clip


def items_of(parts: Sequence[Part]) -> list[Item]:
    """The items of a prompt's plan; of a clip two."""
    items: list[Item] = []
    for part in parts:
        if isinstance(part, Clip):
            items += [part.video, part.sound]
        elif isinstance(part, Item):
            items.append(part)
    return items


@dataclass(frozen=True)
class Expected:
    """The gathered sequence: ids [n], rows [n] of (item, token of its grid) or None, positions [3, n].

    delta: what to add to the number of a token of the answer for its position.
    """

    ids: list[int]
    rows: list[tuple[int, int] | None]
    positions: list[tuple[int, int, int]]
    delta: int


def kept_tokens(item: Item, seed: int = 0) -> list[int]:
    """Tokens of the grid that are kept. evs: those that changed most since the slice before; evs_causal: those of each
    slice; pixel_change here: as evs; random: any; vidcom2 and vcast here: any, with at least one in each slice. Of a
    bounded item any of these, at least one."""
    if item.bounded:
        rng = np.random.default_rng(seed)
        most = kept_tokens(replace(item, bounded=False), seed)
        return sorted(rng.choice(most, rng.integers(1, len(most) + 1), replace=False).tolist())
    if item.num_kept == item.tokens:
        return list(range(item.tokens))
    slice_tokens = item.h * item.w
    if item.method in ("random", "vidcom2", "vcast"):
        order: list[int] = np.random.default_rng(seed).permutation(item.tokens).tolist()
        firsts = [next(token for token in order if token // slice_tokens == i) for i in range(item.t)]
        first = firsts if item.method != "random" else []
        return sorted([*first, *(token for token in order if token not in first)][: item.num_kept])
    scores = []
    for token in range(item.tokens):
        if token < slice_tokens:
            scores.append(math.inf)
            continue
        now, before = item.embeds[token].astype(np.float64), item.embeds[token - slice_tokens].astype(np.float64)
        change = 1 - now @ before / (np.linalg.norm(now) * np.linalg.norm(before))
        scores.append(round(change * 2**16) / 2**16)
    best = sorted(range(item.tokens), key=lambda token: (-scores[token], token))
    if item.method == "evs_causal":
        each = (item.num_kept - slice_tokens) // max(1, item.t - 1)
        later = [[token for token in best if token // slice_tokens == i][:each] for i in range(1, item.t)]
        return sorted([*range(slice_tokens), *(token for tokens in later for token in tokens)])
    return sorted(best[: item.num_kept])


def expected_sequence(parts: Sequence[Part], kept: Sequence[Sequence[int]], pad_id: int) -> Expected:
    """The sequence that the language model must read, from the parts of a prompt and the kept tokens of each item."""
    full = _full_prompt(parts, pad_id)
    gathered = [token for token in full if token.source is None or token.source[1] in kept[token.source[0]]]
    return Expected(
        ids=[token.id for token in gathered],
        rows=[token.source for token in gathered],
        positions=[token.place for token in gathered],
        delta=max((max(token.place) for token in full), default=-1) + 1 - len(gathered),
    )


@dataclass(frozen=True)
class _Token:
    """A token of the full prompt; source: (item, token of its grid), None for text."""

    id: int
    source: tuple[int, int] | None
    place: tuple[int, int, int]


def _full_prompt(parts: Sequence[Part], pad_id: int) -> list[_Token]:
    tokens: list[_Token] = []
    start = items = 0  # the position of what follows: one after the greatest of the piece before
    for part in parts:
        for piece in _pieces(part, items, pad_id):
            own = piece(start)
            tokens += own
            if isinstance(part, Clip):
                start = own[-1].place[0]  # which its last token shares with the token behind it
            elif own:
                start = max(max(token.place) for token in own) + 1
        items += 2 if isinstance(part, Clip) else isinstance(part, Item)
    return tokens


def _pieces(part: Part, number: int, pad_id: int) -> list[Callable[[int], list[_Token]]]:
    """What makes the pieces of a part, whose first item has this number, each from its own start."""
    if isinstance(part, Text):
        return [partial(_text, part)]
    if isinstance(part, Clip):
        return [partial(_clip, part, number, pad_id=pad_id)]
    pieces: list[Callable[[int], list[_Token]]] = []
    for i in range(part.runs):
        pieces += [partial(_text, part.texts[i])] if part.texts else []
        pieces.append(partial(_run, part, i, number, pad_id=pad_id))
    return [*pieces, partial(_text, part.texts[-1])] if part.texts else pieces


def _clip(clip: Clip, number: int, start: int, pad_id: int) -> list[_Token]:
    of_each = [
        _in_chunks(_run(item, 0, number + place, start, pad_id), start, clip.chunk)
        for place, item in enumerate((clip.video, clip.sound))
    ]
    turns = range(max(map(len, of_each)))
    pieces = [chunks[turn] for turn in turns for chunks in of_each if turn < len(chunks)]
    behind = max(max(token.place) for token in pieces[-1]) + 1
    begins, ends = (_Token(i, None, (at,) * 3) for i, at in ((clip.begin, start - 1), (clip.end, behind)))
    return [begins, *(token for piece in pieces for token in piece), ends]


def _in_chunks(tokens: list[_Token], start: int, chunk: int) -> list[list[_Token]]:
    """As transformers cuts them: at each token that is at or behind the next multiple of `chunk`."""
    chunks: list[list[_Token]] = [[]]
    for token in tokens:
        if token.place[0] - start >= len(chunks) * chunk:
            chunks.append([])
        chunks[-1].append(token)
    return chunks


def _text(text: Text, start: int) -> list[_Token]:
    return [_Token(token_id, None, (start + number,) * 3) for number, token_id in enumerate(text.ids)]


def _run(item: Item, run: int, number: int, start: int, pad_id: int) -> list[_Token]:
    """One run of the tokens of an item, from position `start`."""
    size = item.tokens // item.runs
    own = range(run * size, (run + 1) * size)
    if item.linear:
        return [_Token(pad_id, (number, token), (start + place,) * 3) for place, token in enumerate(own)]
    slice_tokens = item.h * item.w
    places = [(token // slice_tokens, token % slice_tokens // item.w, token % item.w) for token in own]
    return [
        _Token(
            pad_id,
            (number, token),
            (start + math.floor((i - places[0][0]) * (item.time_step or 0)), start + j, start + k),
        )
        for token, (i, j, k) in zip(own, places, strict=True)
    ]


@torch.no_grad()
def expected_logprobs(
    text_model: nn.Module,
    lm_head: nn.Module,
    expected: Expected,
    items: Sequence[Item],
    answer: Sequence[int],
    linear: bool = False,
) -> Tensor:
    """Log-probabilities of each token of an answer, teacher-forced: float32 [len(answer), V]."""
    return lm_head(expected_states(text_model, expected, items, answer, linear)).log_softmax(dim=-1)


@torch.no_grad()
def expected_states(
    text_model: nn.Module, expected: Expected, items: Sequence[Item], answer: Sequence[int] = (), linear: bool = False
) -> Tensor:
    """The states after the final norm of a prompt's last token and of all tokens of an answer but its last.

    linear: as `_teacher_forced` takes it. Returns float32 [1 or len(answer), D].
    """
    states: Tensor = _teacher_forced(text_model, expected, items, answer, linear).last_hidden_state[0]
    return states[len(expected.ids) - 1 :]


@torch.no_grad()
def expected_attention(
    text_model: nn.Module, expected: Expected, items: Sequence[Item], answer: Sequence[int], linear: bool = False
) -> Tensor:
    """The attention weights of the rows that the tokens of an answer are drawn from, on the media rows of the prompt,
    item by item.

    Those of transformers' plain attention, with which the model must have been loaded: the mean over all heads of all
    layers that attend. Returns float32 [len(answer), M].
    """
    forward = _teacher_forced(text_model, expected, items, answer, linear, output_attentions=True)
    layers = [each[0] for each in forward.attentions if each is not None]
    media = [row for _, row in sorted((source, row) for row, source in enumerate(expected.rows) if source is not None)]
    return torch.stack(layers).mean(dim=(0, 1))[len(expected.ids) - 1 :, media]


def _teacher_forced(
    text_model: nn.Module,
    expected: Expected,
    items: Sequence[Item],
    answer: Sequence[int],
    linear: bool,
    **more: Any,
) -> Any:
    """One unchunked forward of transformers' own text model over the gathered sequence and all tokens of the answer but
    the last. linear: the model takes one-dimensional positions. more: of its arguments."""
    ids = [*expected.ids, *answer[:-1]]
    embeds = text_model.get_input_embeddings()(torch.tensor(ids))  # type: ignore[operator]
    media = [(row, source) for row, source in enumerate(expected.rows) if source is not None]
    for row, (item, token) in media:
        embeds[row] = torch.from_numpy(items[item].embeds[token])
    said = len(ids) - len(expected.ids)
    positions = [*expected.positions, *[(len(expected.ids) + i + expected.delta,) * 3 for i in range(said)]]
    axes = torch.tensor(positions).T  # [3, n]
    return text_model(
        inputs_embeds=embeds[None],
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),  # without it, gaps in positions separate sequences
        position_ids=axes[:1] if linear else axes[:, None],
        use_cache=False,
        **_deepstack(len(ids), media, items),
        **more,
    )


def _deepstack(
    tokens: int, media: Sequence[tuple[int, tuple[int, int]]], items: Sequence[Item]
) -> dict[str, Tensor | list[Tensor]]:
    """Deepstack arguments of transformers' text model for (row, (item, token)) pairs; empty without levels."""
    levels = max((len(item.deepstack) for item in items), default=0)
    if not levels:
        return {}
    mask = torch.zeros(1, tokens, dtype=torch.bool)
    mask[0, [row for row, _ in media]] = True
    features = [
        torch.stack([torch.from_numpy(items[item].deepstack[level][token]) for _, (item, token) in media])
        for level in range(levels)
    ]
    return {"visual_pos_masks": mask, "deepstack_visual_embeds": features}


@dataclass
class LiveRows:
    """All rows that a live session ever computed: ids, embeddings of media rows (with their levels), positions, and the
    first row that was not evicted when each was computed.

    pinned: how many of the first rows are never evicted, rounded up to a block.
    """

    pinned: int = 0
    ids: list[int] = field(default_factory=list)
    embeds: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # by row, [1 + levels, D]
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    oldest: list[int] = field(default_factory=list)

    @torch.no_grad()
    def logprobs(self, text_model: nn.Module, lm_head: nn.Module) -> Tensor:
        """Of the token after each row, float32 [n, V]: one forward, in which a row sees those that the cache held."""
        embeds = text_model.get_input_embeddings()(torch.tensor(self.ids))  # type: ignore[operator]
        for row, own in self.embeds.items():
            embeds[row] = torch.from_numpy(own[0])
        seen = [
            [other <= row and (other < self.pinned or other >= oldest) for other in range(len(self.ids))]
            for row, oldest in enumerate(self.oldest)
        ]
        mask = torch.zeros(len(seen), len(seen)).masked_fill(~torch.tensor(seen), -math.inf)
        levels = [] if not self.embeds else list(next(iter(self.embeds.values())))[1:]
        deepstack: dict[str, Any] = {}
        if levels:
            rows = sorted(self.embeds)
            media = torch.zeros(1, len(seen), dtype=torch.bool)
            media[0, rows] = True
            added = [torch.from_numpy(np.stack([self.embeds[row][1 + n] for row in rows])) for n in range(len(levels))]
            deepstack = {"visual_pos_masks": media, "deepstack_visual_embeds": added}
        hidden = text_model(
            inputs_embeds=embeds[None],
            attention_mask=mask[None, None],
            position_ids=torch.tensor(self.positions).T[:, None],
            use_cache=False,
            **deepstack,
        ).last_hidden_state[0]
        return lm_head(hidden).log_softmax(dim=-1)
