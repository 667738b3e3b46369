"""An engine whose model keeps for every token the whole sequence up to it.

Reading a block of anything else, or of the same thing behind something else, is seen at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from services.generation.engine.engine import Engine
from services.generation.request.batch import Window
from services.generation.request.request import Adapter, Event, Request
from services.generation.sampling.sampler import SampledToken, SamplingParams, sample_and_verify
from tests.oracle import Item, Text
from tests.tiny import BLOCK_TOKENS, Asked, WholeWords, make_request, media_item


@dataclass
class SequenceRunner:
    """Keeps in each slot what its key depends on: everything from the sequence's first token to its own."""

    model: Any = field(default_factory=lambda: SimpleNamespace(hidden_size=1, device=torch.device("cpu")))
    slots: dict[int, tuple[object, ...]] = field(default_factory=dict)

    def run(self, windows: Sequence[Window]) -> dict[Window, list[SampledToken]]:
        for window in windows:
            adapter = window.request.adapter and window.request.adapter.digest
            sequence = [(adapter, *row(window, token)) for token in range(window.end)]
            for token in range(window.end):
                block = window.request.blocks[token // BLOCK_TOKENS]
                slot = block * BLOCK_TOKENS + token % BLOCK_TOKENS
                if token >= window.start:
                    self.slots[slot] = tuple(sequence[: token + 1])
                assert self.slots[slot] == tuple(sequence[: token + 1]), f"{window} reads another sequence at {token}"
        sampled = [window for window in windows if window.samples]
        # Two tokens, by turns: answers of different requests are as alike as their prompts.
        ends = [end for window in sampled for end in range(window.end - window.num_draft_tokens, window.end + 1)]
        logits = torch.tensor([[0.0, 1.0 - end % 2, 0.5] for end in ends])
        states = [window.request.sampling_state for window in sampled]
        drafts = [window.draft_tokens for window in sampled]
        return dict(zip(sampled, sample_and_verify(logits, states, drafts), strict=True))


def row(window: Window, token: int) -> tuple[object, ...]:
    """What a token's own key depends on, from the request's item and what was kept of it."""
    request = window.request
    if token >= request.rope.tokens:
        said = [*request.output_ids, *window.draft_tokens]
        return (said[token - request.rope.tokens], (token + request.rope.delta,) * 3)
    place = tuple(request.rope.positions[:, token].tolist())
    for span in request.rope.spans:
        if span.offset <= token < span.end:
            answer = request.encoded_media[span.media_index]
            assert answer
            assert answer.kept is not None
            item: Item = ITEMS_OF[request][span.media_index]
            kept = int(answer.kept[span.first_row + token - span.offset])
            return (item.embeds[kept].tobytes(), place)
    return (int(request.rope.ids[token]), place)


ITEMS_OF: dict[Request, list[Item]] = {}


@dataclass
class Desk:
    engine: Engine
    waiting: list[tuple[Asked, list[Item]]] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)

    def ask(self, parts: Sequence[Text | Item], new_tokens: int, others: int, adapter: Adapter | None = None) -> None:
        asked = make_request(str(len(self.asked)), parts, SamplingParams(new_tokens), adapter)
        contents = [part for part in parts if isinstance(part, Item)]
        ITEMS_OF[asked.request] = contents
        for number in range(others):
            own: list[Event] = []
            sibling = asked.request.add_sibling(str(number), SamplingParams(new_tokens), WholeWords(), own.append)
            asked.others.append(Asked(sibling, own))
            ITEMS_OF[sibling] = contents
        if asked.request.max_tokens > self.engine.stats().blocks_total * BLOCK_TOKENS:
            return
        self.engine.submit(asked.request)
        asked.spared = tuple(set(range(len(contents))) - set(asked.request.wanted_media))
        self.asked.append(asked)
        self.waiting.append((asked, contents))

    def deliver(self, place: int, seed: int) -> None:
        asked, contents = self.waiting.pop(place)
        for index in asked.request.wanted_media:
            item = contents[index]
            order = np.random.default_rng(seed).permutation(item.tokens)
            self.engine.deliver(asked.request, media_item(index, item, sorted(order[: item.kept_count].tolist())))

    def leave(self, asked: Asked) -> None:
        for each in (asked, *asked.others):
            self.engine.cancel(each.request)
        self.waiting = [each for each in self.waiting if each[0] is not asked]

    def step(self) -> bool:
        stepped = self.engine.step()
        self.engine.check_integrity()
        # Once it sleeps, only what arrives wakes it.
        assert stepped or not self.engine.step(), "it would sleep though something can run"
        failed = [each.failed for each in self.asked if each.failed]
        assert not failed, failed
        for each in self.asked:
            assert each.request.cached_tokens < each.request.rope.tokens
        return stepped

    def run(self) -> None:
        steps = 0
        while self.step():
            steps += 1
            assert steps < 5000, "the engine stands still"
