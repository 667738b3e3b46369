"""The engine never reads a cached block as something that it is not, however alike prompts are and however small the
cache is, and every request that can run does.

The model of these tests stores the whole sequence up to a token in the token's slot. Reading a block of another
sequence, or the same tokens after another prefix, fails at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from gridsieve.services.generation.engine.engine import Engine
from gridsieve.services.generation.memory.blocks import ROOT, BlockAllocator
from gridsieve.services.generation.memory.state_slots import NO_STATE, StateSlots
from gridsieve.services.generation.model.runner import LaunchedStep, SampledStep
from gridsieve.services.generation.model.states import RESERVED
from gridsieve.services.generation.request.batch import Chunk, media_rows
from gridsieve.services.generation.request.request import Adapter, Event, Failed, Finished, Request
from gridsieve.services.generation.sampling.sampler import SamplingParams
from tests.oracle import Item, Text
from tests.tiny import BLOCK_TOKENS, Asked, WholeWords, make_request, media_item

OPENING = Text((1, 2))
VIDEO = Item(4, 1, 3, Fraction(1), np.zeros((12, 1), np.float32), method="random")
OTHER = replace(VIDEO, embeds=np.ones((12, 1), np.float32))
# The first two are one adapter under two names.
ADAPTERS = (Adapter("one", bytes(31) + b"1"), Adapter("same", bytes(31) + b"1"), Adapter("other", bytes(31) + b"2"))
# An item, and others that differ from it in one thing only: embeddings, time step, rate or grid.
TWINS = (VIDEO, OTHER, replace(VIDEO, time_step=Fraction(2)), replace(VIDEO, rate=0.25), replace(VIDEO, t=2, h=2))
texts = st.lists(st.integers(1, 2), min_size=1, max_size=6).map(lambda ids: Text(tuple(ids)))


@dataclass
class SequenceRunner:
    """Stores in each slot everything that its key depends on: the sequence from its first token to its own.

    states: the sequence that each slot of recurrent states has seen; none of models without any.
    """

    items: dict[Request, list[Item]]
    max_num_batched_tokens: int
    model: Any = field(default_factory=lambda: SimpleNamespace(hidden_size=1, device=torch.device("cpu")))
    slots: dict[int, tuple[object, ...]] = field(default_factory=dict)
    states: dict[int, tuple[object, ...]] = field(default_factory=lambda: {NO_STATE: ()})
    drafter: None = None

    def launch(self, chunks: Sequence[Chunk], before: SampledStep | None) -> LaunchedStep:
        assert sum(chunk.tokens for chunk in chunks) <= self.max_num_batched_tokens
        for chunk in chunks:
            adapter = chunk.request.adapter and chunk.request.adapter.digest
            sequence = [(adapter, *self.row(chunk, token)) for token in range(chunk.end)]
            for token in range(chunk.end):
                slot = chunk.request.holding.blocks[token // BLOCK_TOKENS] * BLOCK_TOKENS + token % BLOCK_TOKENS
                if token >= chunk.start:
                    self.slots[slot] = tuple(sequence[: token + 1])
                assert self.slots[slot] == tuple(sequence[: token + 1]), f"{chunk} reads another sequence at {token}"
            if chunk.request.holding.states.next:
                seen = self.states[chunk.request.holding.states.current]
                assert seen == tuple(sequence[: chunk.start]), f"{chunk} begins with the state of another sequence"
                for tokens, slot in chunk.request.holding.states.next:
                    self.states[slot] = tuple(sequence[:tokens])
            for rows in media_rows(chunk, 0):
                embeds = chunk.request.embeds[rows.media_index]
                assert embeds is not None
                dropped = chunk.request.prompt.num_kept[rows.media_index] - embeds.shape[1]
                assert rows.first_row >= dropped, f"{chunk} computes rows again that it has not received"
        # Answers alternate between two tokens, so that answers of different requests are as alike as their prompts.
        sampling = (chunk for chunk in chunks if chunk.samples)
        ends = [end for chunk in sampling for end in range(chunk.end - chunk.num_draft_tokens, chunk.end + 1)]
        logits = torch.tensor([[0.0, 1.0 - end % 2, 0.5] for end in ends])
        return LaunchedStep(chunks, logits, 0, False, None)

    def row(self, chunk: Chunk, token: int) -> tuple[object, ...]:
        """What a token's own key depends on, from the request's items and what was kept of them."""
        request = chunk.request
        if token >= request.prompt.tokens:
            said = [*request.output_ids, *chunk.draft_tokens]
            return (said[token - request.prompt.tokens], (token + request.prompt.delta,) * 3)
        place = tuple(request.prompt.positions[:, token].tolist())
        for span in request.prompt.spans:
            if span.offset <= token < span.end:
                encoded = request.encoded_media[span.media_index]
                assert encoded
                assert encoded.kept is not None
                kept = int(encoded.kept[span.first_row + token - span.offset])
                return (self.items[request][span.media_index].embeds[kept].tobytes(), place)
        return (int(request.prompt.ids[token]), place)


class Desk:
    """An engine over a `SequenceRunner`, and the requests that were submitted to it."""

    def __init__(
        self,
        blocks: int,
        max_num_batched_tokens: int = 64,
        max_draft_tokens: int = 0,
        max_num_seqs: int = 4,
        snapshots: int | None = None,
    ) -> None:
        """snapshots: slots of recurrent states beside those of running sequences; None: the model has no states."""
        self.items: dict[Request, list[Item]] = {}
        runner: Any = SequenceRunner(self.items, max_num_batched_tokens)
        allocator = BlockAllocator(blocks, BLOCK_TOKENS)
        states = None if snapshots is None else StateSlots(2 * max_num_seqs + snapshots, RESERVED)
        self.engine = Engine(
            runner, allocator, max_num_batched_tokens, max_num_seqs, 64, max_draft_tokens, states=states
        )
        self.max_num_seqs = max_num_seqs
        self.capacity_tokens = blocks * BLOCK_TOKENS
        self.undelivered: list[Asked] = []
        self.asked: list[Asked] = []

    def ask(
        self, parts: Sequence[Text | Item], new_tokens: int, siblings: int = 0, adapter: Adapter | None = None
    ) -> None:
        asked = make_request(str(len(self.asked)), parts, SamplingParams(new_tokens), adapter)
        items = [part for part in parts if isinstance(part, Item)]
        self.items[asked.request] = items
        for number in range(siblings):
            own: list[Event] = []
            sibling = asked.request.add_sibling(str(number), SamplingParams(new_tokens), WholeWords(), own.append)
            asked.others.append(Asked(sibling, own))
            self.items[sibling] = items
        if asked.request.max_tokens > self.capacity_tokens:
            return
        self.engine.submit(asked.request)
        asked.spared = tuple(set(range(len(items))) - set(asked.request.wanted_media))
        self.asked.append(asked)
        self.undelivered.append(asked)

    def deliver(self, number: int = 0, seed: int = 0) -> None:
        """Delivers the media of an undelivered request; the seed selects which tokens the encoder keeps."""
        asked = self.undelivered.pop(number)
        for index in asked.request.wanted_media:
            item = self.items[asked.request][index]
            order = np.random.default_rng(seed).permutation(item.tokens)
            self.engine.deliver(asked.request, media_item(index, item, sorted(order[: item.num_kept].tolist())))

    def cancel(self, asked: Asked) -> None:
        for each in (asked, *asked.others):
            self.engine.cancel(each.request)
        self.undelivered = [each for each in self.undelivered if each is not asked]

    def step(self) -> bool:
        stepped = self.engine.step()
        self.engine.check_integrity()
        assert self.engine.stats().running <= self.max_num_seqs
        assert stepped or not self.engine.step(), "the engine would sleep although something can run"
        assert not [each.failed for each in self.asked if each.failed]
        assert all(each.request.cached_tokens < each.request.prompt.tokens for each in self.asked)
        return stepped

    def run(self) -> None:
        steps = 0
        while self.step():
            steps += 1
            assert steps < 5000, "the engine makes no progress"


def assert_blocks_hold_what_is_read(data: st.DataObject) -> None:
    desk = Desk(
        data.draw(st.integers(8, 40)),
        data.draw(st.sampled_from((1, 4, 7, 64))),
        data.draw(st.integers(0, 2)),
        3,
        data.draw(st.sampled_from((None, 0, 1, 3, 10))),
    )
    prompts: list[list[Text | Item]] = []
    pool = [VIDEO, *data.draw(st.lists(st.sampled_from(TWINS[1:]), min_size=1, max_size=2, unique_by=id))]
    for _ in range(data.draw(st.integers(4, 12))):
        act = data.draw(st.sampled_from(("ask", "ask", "deliver", "step", "step", "cancel")))
        if act == "ask":
            if not prompts or data.draw(st.booleans()):
                prompts.append([OPENING, *data.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=2))])
            parts = data.draw(st.sampled_from(prompts))
            adapter = data.draw(st.sampled_from((None, None, *ADAPTERS)))
            desk.ask([*parts, data.draw(texts)], data.draw(st.integers(1, 6)), data.draw(st.integers(0, 2)), adapter)
        elif act == "deliver" and desk.undelivered:
            desk.deliver(data.draw(st.integers(0, len(desk.undelivered) - 1)), data.draw(st.sampled_from((0, 0, 0, 1))))
        elif act == "cancel" and desk.asked:
            desk.cancel(desk.asked.pop(data.draw(st.integers(0, len(desk.asked) - 1))))
        for _ in range(data.draw(st.sampled_from((0, 1, 30)))):
            desk.step()
    while desk.undelivered:
        desk.deliver()
    desk.run()
    for each in desk.asked:
        for one in (each, *each.others):
            assert sum(isinstance(event, Finished | Failed) for event in one.events) == 1
    event(f"prefix hit: {any(each.request.cached_tokens for each in desk.asked)}")
    event(f"media not sent again: {any(each.spared for each in desk.asked)}")
    stats = desk.engine.stats()
    event(f"preempted: {desk.engine._scheduler.preemptions > 0}, with states: {stats.states_total > 0}")
    assert (stats.blocks_used, stats.states_used) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_block_is_read_only_by_requests_whose_sequence_it_holds(data: st.DataObject) -> None:
    assert_blocks_hold_what_is_read(data)


@pytest.mark.deep
@pytest.mark.timeout(3600)
@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_a_block_is_read_only_by_requests_whose_sequence_it_holds_in_many_cases(data: st.DataObject) -> None:
    assert_blocks_hold_what_is_read(data)


def test_no_block_is_shared_by_items_that_differ_in_one_thing() -> None:
    """One of them is encoded to the same rows, at other times."""
    desk = Desk(64)
    for video in TWINS:
        desk.ask([OPENING, video, Text((1,))], 2)
        desk.deliver()
        desk.run()


def test_draft_tokens_do_not_keep_a_prompt_from_being_prefilled() -> None:
    desk = Desk(40, max_num_batched_tokens=3, max_draft_tokens=2)
    desk.ask([Text((1, 2)), VIDEO, Text((1, 2) * 5)], 4)
    older = desk.asked[-1]
    desk.ask([Text((5, 6))], 90)
    newer = desk.asked[-1]
    while len(newer.request.output_ids) < 2:
        desk.step()
    desk.deliver()
    while not older.finished:
        desk.step()
    assert not newer.finished


def test_blocks_that_running_requests_share_do_not_count_as_room_for_a_new_request() -> None:
    """Many questions that begin alike: none is admitted only to preempt another."""
    desk = Desk(40, max_num_batched_tokens=32, max_num_seqs=12)
    alike = Text(tuple(range(100, 164)))
    desk.ask([alike, Text((5,))], 1)
    desk.run()
    for number in range(12):
        desk.ask([alike, Text(tuple(range(200 + 40 * number, 216 + 40 * number)))], 8)
    desk.run()
    assert desk.engine._scheduler.preemptions == 0


def test_simultaneous_questions_share_what_the_first_has_computed() -> None:
    desk = Desk(64)
    for _ in range(2):
        desk.ask([OPENING, VIDEO, Text((1, 2, 2))], 3)
    for _ in range(2):
        desk.step()
        desk.deliver()
    desk.run()
    request = desk.asked[1].request
    assert request.cached_tokens == request.prompt.tokens // BLOCK_TOKENS * BLOCK_TOKENS


def test_siblings_end_with_the_request_that_they_wait_for() -> None:
    desk = Desk(24)
    desk.ask([OPENING, VIDEO, Text((1,))], 5, siblings=2)
    asked = desk.asked.pop()
    desk.engine.deliver(asked.request, media_item(1, VIDEO, range(12)))  # there is no item 1
    desk.run()
    assert all(each.failed for each in (asked, *asked.others))
    desk.ask([OPENING, VIDEO, Text((1,))], 5, siblings=2)
    desk.cancel(desk.asked[-1])
    desk.run()
    desk.ask([OPENING, VIDEO, Text((1,))], 5, siblings=63)  # needs all places of the engine
    assert desk.asked[-1].request.siblings


# --- the allocator ----------------------------------------------------------------------------------------------------


def test_a_single_request_gets_neighbouring_blocks() -> None:
    allocator = BlockAllocator(8, block_tokens=16)
    allocator.decref(allocator.allocate(5))
    assert allocator.allocate(3) + allocator.allocate(2) == [0, 1, 2, 3, 4]


def test_the_least_recently_released_prefix_is_evicted_first_from_its_end() -> None:
    allocator = BlockAllocator(5, block_tokens=16)
    keys = {}
    for name in (b"old", b"new"):
        blocks = allocator.allocate(2)
        parent = allocator.cache(blocks[0], ROOT, name, ())
        allocator.cache(blocks[1], parent, b"end", ())
        keys[name] = [(ROOT, name), (parent, b"end")]
        allocator.decref(blocks)

    def found(name: bytes) -> list[bool]:
        return [allocator.lookup(*key) is not None for key in keys[name]]

    allocator.allocate(2)  # one empty block and one evicted
    assert (found(b"old"), found(b"new")) == ([True, False], [True, True])
    allocator.allocate(2)
    assert (found(b"old"), found(b"new")) == ([False, False], [True, False])


def test_a_serial_is_never_used_again() -> None:
    """Otherwise a block with new content could pass for the parent of blocks that followed its old content."""
    allocator = BlockAllocator(2, block_tokens=16)
    blocks = allocator.allocate(2)
    first = allocator.cache(blocks[0], ROOT, b"a", ())
    allocator.decref(blocks)
    again = allocator.allocate(2)
    assert allocator.lookup(ROOT, b"a") is None
    assert allocator.cache(again[0], ROOT, b"a", ()) != first


def test_owners_live_until_their_block_is_evicted() -> None:
    owner = threading.Event()
    seen = weakref.ref(owner)
    allocator = BlockAllocator(1, block_tokens=16)
    blocks = allocator.allocate(1)
    allocator.cache(blocks[0], ROOT, b"a", (owner,))
    allocator.decref(blocks)
    del owner
    assert seen()
    allocator.allocate(1)
    assert not seen()
