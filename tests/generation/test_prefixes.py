"""No block is ever read as what it is not, however alike prompts are and however little room there is; and whoever can
run does."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from services.generation.engine.engine import Engine
from services.generation.kv_cache.blocks import BlockAllocator
from services.generation.request.request import Adapter, Failed, Finished
from tests.generation.sequence_desk import ITEMS_OF, Desk, SequenceRunner
from tests.oracle import Item, Text
from tests.tiny import BLOCK_TOKENS, media_item

OPENING = Text((1, 2))
VIDEO = Item(4, 1, 3, Fraction(1), np.zeros((12, 1), np.float32), method="random")
OTHER = replace(VIDEO, embeds=np.ones((12, 1), np.float32))
# The first two are one adapter by two names.
ADAPTERS = (Adapter("one", bytes(31) + b"1"), Adapter("same", bytes(31) + b"1"), Adapter("other", bytes(31) + b"2"))
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
            adapter = data.draw(st.sampled_from((None, None, *ADAPTERS)))
            desk.ask([*parts, data.draw(texts)], data.draw(st.integers(1, 6)), data.draw(st.integers(0, 2)), adapter)
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
    desk.run()
    for each in desk.asked:
        for one in (each, *each.others):
            assert sum(isinstance(event, Finished | Failed) for event in one.events) == 1
    event(f"shared: {any(each.request.cached_tokens for each in desk.asked)}")
    event(f"media spared: {any(each.spared for each in desk.asked)}")
    event(f"preempted: {engine.stats().totals.preemptions > 0}")
    assert engine.stats().blocks_used == 0


def test_blocks_come_back_after_a_thousand_mixed_cancelled_and_preempted_requests() -> None:
    ITEMS_OF.clear()
    runner: Any = SequenceRunner()
    engine = Engine(runner, BlockAllocator(24, BLOCK_TOKENS), 16, 4, 64, max_draft_tokens=2)
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
    desk.run()
    stats = engine.stats()
    assert min(spared, cancelled, stats.totals.preemptions, stats.totals.accepted_draft_tokens) > 50
    assert stats.blocks_used == 0
    engine.check_integrity()


def desk_of(blocks: int, max_num_batched_tokens: int = 64, max_draft_tokens: int = 0) -> Desk:
    ITEMS_OF.clear()
    runner: Any = SequenceRunner()
    return Desk(Engine(runner, BlockAllocator(blocks, BLOCK_TOKENS), max_num_batched_tokens, 4, 64, max_draft_tokens))


def test_what_an_adapter_computes_again_after_a_preemption_is_read_by_its_own_alone() -> None:
    desk = desk_of(10)
    alike = Text((1, 2) * 4)
    desk.ask([Text((5, 6) * 4)], 20, 0)
    desk.ask([alike], 20, 0, ADAPTERS[0])
    desk.run()
    assert desk.engine.stats().totals.preemptions, "nobody was preempted"
    cached = []
    for adapter in (None, *ADAPTERS):
        desk.ask([alike], 1, 0, adapter)
        desk.run()
        cached.append(desk.asked[-1].request.cached_tokens)
    assert cached == [0, BLOCK_TOKENS, BLOCK_TOKENS, 0]


def test_an_older_request_runs_on_when_a_newer_one_gives_way_to_what_it_has_pinned() -> None:
    """Its first video is pinned, its second comes late; meanwhile a newer one has grown over all that is left."""
    desk = desk_of(24)
    desk.ask([OPENING, VIDEO, Text((1,))], 1, 0)
    desk.deliver(0, 0)
    desk.run()
    desk.ask([OPENING, VIDEO, Text((1,)), OTHER, Text((2, 2))], 8, 0)
    older = desk.asked[-1]
    assert older.spared == (0,)
    desk.ask([Text((2, 1, 2, 2, 1, 1, 2))], 24 * BLOCK_TOKENS - 10, 0)
    newer = desk.asked[-1]
    while newer.request.tokens < 78:
        desk.step()
    desk.deliver(0, 0)
    desk.run()
    assert older.finished
    assert newer.finished


def test_guesses_do_not_keep_a_prompt_from_being_computed() -> None:
    desk = desk_of(40, max_num_batched_tokens=3, max_draft_tokens=2)
    desk.ask([Text((1, 2)), VIDEO, Text((1, 2) * 5)], 4, 0)
    older = desk.asked[-1]
    desk.ask([Text((5, 6))], 90, 0)
    newer = desk.asked[-1]
    while len(newer.request.output_ids) < 2:
        desk.step()
    desk.deliver(0, 0)
    while not older.finished:
        desk.step()
    assert not newer.finished


def test_what_others_hold_too_is_no_room_for_a_newcomer() -> None:
    """Many questions that begin alike: none is admitted only to push another out."""
    desk = desk_of(40, max_num_batched_tokens=32)
    alike = Text(tuple(range(100, 164)))
    desk.ask([alike, Text((5,))], 1, 0)
    desk.run()
    for number in range(12):
        desk.ask([alike, Text(tuple(range(200 + 40 * number, 216 + 40 * number)))], 8, 0)
    desk.run()
    assert desk.engine.stats().totals.preemptions == 0


def test_questions_at_the_same_time_share_what_the_first_has_computed() -> None:
    """Also where the text before the video was computed early, and ends in the middle of a block."""
    desk = desk_of(64)
    for _ in range(2):
        desk.ask([OPENING, VIDEO, Text((1, 2, 2))], 3, 0)
    desk.step()
    desk.deliver(0, 0)
    desk.step()
    desk.deliver(0, 0)
    desk.run()
    tokens = desk.asked[1].request.rope.tokens
    assert desk.asked[1].request.cached_tokens == tokens // BLOCK_TOKENS * BLOCK_TOKENS - len(OPENING.ids)


def test_further_answers_end_with_the_one_that_they_wait_for() -> None:
    desk = desk_of(24)
    desk.ask([OPENING, VIDEO, Text((1,))], 5, 2)
    asked = desk.asked.pop()
    desk.engine.deliver(asked.request, media_item(1, VIDEO, range(12)))
    desk.run()
    assert all(each.failed for each in (asked, *asked.others))
    desk.ask([OPENING, VIDEO, Text((1,))], 5, 2)
    desk.leave(desk.asked[-1])
    desk.run()
    desk.ask([OPENING, VIDEO, Text((1,))], 5, 63)
    assert desk.asked[-1].request.siblings, "places were lost"


def test_a_further_answer_that_is_given_up_before_it_begins_harms_no_other() -> None:
    desk = desk_of(24)
    desk.ask([Text((1, 2, 1))], 5, 2)
    asked = desk.asked[-1]
    desk.engine.cancel(asked.others[0].request)
    desk.run()
    assert asked.finished
    assert asked.others[1].finished
    assert not asked.others[0].events
