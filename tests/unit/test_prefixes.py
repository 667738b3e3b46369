"""No block is ever read as what it is not, however alike prompts are and however little room there is.

The model is replaced by one whose keys are the whole sequence up to a token, so that reading a block of anything else,
or of the same thing behind something else, is seen at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.generation.blocks import BlockAllocator
from services.generation.engine import Engine
from services.generation.request import Event, Failed, Finished, Request
from services.generation.sampler import SamplingParams
from services.generation.windows import Window
from tests.oracle import Item, Text
from tests.tiny import BLOCK_TOKENS, Asked, WholeWords, make_request, media_item


@dataclass
class SequenceRunner:
    """Keeps in each slot what its key depends on: everything from the sequence's first token to its own."""

    model: Any = field(default_factory=lambda: SimpleNamespace(hidden_size=1, device=torch.device("cpu")))
    slots: dict[int, tuple[object, ...]] = field(default_factory=dict)

    def run(self, windows: Sequence[Window]) -> tuple[list[Window], Tensor]:
        for window in windows:
            sequence = [row(window.request, token) for token in range(window.end)]
            for token in range(window.end):
                block = window.request.blocks[token // BLOCK_TOKENS]
                slot = block * BLOCK_TOKENS + token % BLOCK_TOKENS
                if token >= window.start:
                    self.slots[slot] = tuple(sequence[: token + 1])
                assert self.slots[slot] == tuple(sequence[: token + 1]), f"{window} reads another sequence at {token}"
        sampled = [window for window in windows if window.samples]
        # Two tokens, by turns: answers of different requests are as alike as their prompts.
        ends = [end for window in sampled for end in range(window.end - window.guesses, window.end + 1)]
        return sampled, torch.tensor([[0.0, 1.0 - end % 2, 0.5] for end in ends])


def row(request: Request, token: int) -> tuple[object, ...]:
    """What a token's own key depends on, from the request's item and what was kept of it."""
    if token >= request.rope.tokens:
        said = [*request.output_ids, *request.guesses]
        return (said[token - request.rope.tokens], (token + request.rope.delta,) * 3)
    place = tuple(request.rope.positions[:, token].tolist())
    for span in request.rope.spans:
        if span.offset <= token < span.end:
            answer = request.answers[span.media_index]
            assert answer
            assert answer.kept is not None
            item: Item = ITEMS_OF[request][span.media_index]
            kept = int(answer.kept[span.first_row + token - span.offset])
            return (item.embeds[kept].tobytes(), place)
    return (int(request.rope.ids[token]), place)


OPENING = Text((1, 2))
ITEMS_OF: dict[Request, list[Item]] = {}

texts = st.lists(st.integers(1, 2), min_size=1, max_size=6).map(lambda ids: Text(tuple(ids)))


@st.composite
def twins(draw: st.DrawFn) -> list[Item]:
    """An item, and others that differ from it in one thing alone: embeddings, time step, rate, or grid."""
    item = Item(4, 1, 3, Fraction(1), np.zeros((12, 1), np.float32), draw(st.sampled_from([0.0, 0.5])), method="random")
    others = [
        replace(item, embeds=np.ones((12, 1), np.float32)),
        replace(item, time_step=Fraction(2)),
        replace(item, rate=0.25),
        replace(item, t=2, h=2),
    ]
    return [item, *draw(st.lists(st.sampled_from(others), min_size=1, max_size=2, unique_by=id))]


@dataclass
class Desk:
    engine: Engine
    waiting: list[tuple[Asked, list[Item]]] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)

    def ask(self, parts: Sequence[Text | Item], new_tokens: int, others: int) -> None:
        asked = make_request(str(len(self.asked)), parts, SamplingParams(new_tokens))
        contents = [part for part in parts if isinstance(part, Item)]
        ITEMS_OF[asked.request] = contents
        for number in range(others):
            own: list[Event] = []
            follower = asked.request.add_follower(str(number), SamplingParams(new_tokens), WholeWords(), own.append)
            asked.others.append(Asked(follower, own))
            ITEMS_OF[follower] = contents
        if asked.request.max_tokens > self.engine.capacity_tokens:
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
        failed = [each.failed for each in self.asked if each.failed]
        assert not failed, failed
        return stepped


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_block_is_read_by_those_alone_whose_sequence_it_holds(data: st.DataObject) -> None:
    ITEMS_OF.clear()
    runner: Any = SequenceRunner()
    blocks = data.draw(st.integers(8, 40))
    guess = data.draw(st.integers(0, 2))
    engine = Engine(
        runner, BlockAllocator(blocks, BLOCK_TOKENS), data.draw(st.sampled_from((1, 4, 7, 64))), 3, 64, guess
    )
    desk = Desk(engine)
    prompts: list[list[Text | Item]] = []
    pool = data.draw(twins())
    for _ in range(data.draw(st.integers(4, 12))):
        act = data.draw(st.sampled_from(("ask", "ask", "deliver", "step", "step", "leave")))
        if act == "ask":
            # As often as not something that was asked about before.
            if not prompts or data.draw(st.booleans()):
                prompts.append([OPENING, *data.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=2))])
            parts = data.draw(st.sampled_from(prompts))
            desk.ask([*parts, data.draw(texts)], data.draw(st.integers(1, 6)), data.draw(st.integers(0, 2)))
        elif act == "deliver" and desk.waiting:
            # Two seeds: the encoder sometimes comes back with another choice.
            desk.deliver(data.draw(st.integers(0, len(desk.waiting) - 1)), data.draw(st.sampled_from((0, 0, 0, 1))))
        elif act == "leave" and desk.asked:
            leaver = desk.asked.pop(data.draw(st.integers(0, len(desk.asked) - 1)))
            desk.leave(leaver)
        for _ in range(data.draw(st.sampled_from((0, 1, 30)))):
            desk.step()
    while desk.waiting:
        desk.deliver(0, 0)
    steps = 0
    while desk.step():
        steps += 1
        assert steps < 5000, "the engine stands still"
    for each in desk.asked:
        for one in (each, *each.others):
            assert sum(isinstance(event, Finished | Failed) for event in one.events) == 1
    event(f"shared: {any(each.request.cached_tokens for each in desk.asked)}")
    event(f"media spared: {any(each.spared for each in desk.asked)}")
    event(f"preempted: {engine.stats().preemptions_total > 0}")
    assert engine.stats().blocks_used == 0


def test_blocks_come_back_after_a_thousand_mixed_cancelled_and_preempted_requests() -> None:
    ITEMS_OF.clear()
    runner: Any = SequenceRunner()
    engine = Engine(runner, BlockAllocator(24, BLOCK_TOKENS), 16, 4, 64, guess_tokens=2)
    desk = Desk(engine)
    random = np.random.default_rng(5)
    item = Item(4, 1, 3, Fraction(1), np.zeros((12, 1), np.float32), 0.5, method="random")
    prompts: list[list[Text | Item]] = [
        [OPENING],
        [OPENING, item],
        [OPENING, replace(item, rate=0.0)],
        [OPENING, replace(item, embeds=np.ones((12, 1), np.float32)), Text((2,)), item],
    ]
    spared = cancelled = 0
    for number in range(1000):
        parts = prompts[random.integers(len(prompts))]
        end = Text(tuple(random.integers(1, 3, random.integers(1, 9)).tolist()))
        desk.ask([*parts, end], int(random.integers(1, 60)), int(number % 10 == 0))
        spared += bool(desk.asked[-1].spared)
        while len(desk.waiting) > random.integers(0, 6):
            desk.deliver(int(random.integers(len(desk.waiting))), int(random.integers(0, 8) == 0))
        if random.integers(0, 5) == 0:
            desk.leave(desk.asked.pop(int(random.integers(len(desk.asked)))))
            cancelled += 1
        for _ in range(random.integers(0, 20)):
            desk.step()
        while engine.stats().running + engine.stats().waiting > 12:
            desk.step()
        desk.asked = [each for each in desk.asked if not each.finished]
    while desk.waiting:
        desk.deliver(0, 0)
    while desk.step():
        pass
    stats = engine.stats()
    assert min(spared, cancelled, stats.preemptions_total, stats.right_guesses_total) > 50
    assert stats.blocks_used == 0
    engine.check_integrity()
