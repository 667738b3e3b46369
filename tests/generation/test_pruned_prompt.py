"""The pruned prompt is gathered item by item, and chunks of it are packed into one batch."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framesieve.common.contract.errors import PeerContract
from framesieve.common.contract.plan import MAX_POSITION
from framesieve.services.generation.request.batch import Chunk, decodes_first, pack
from framesieve.services.generation.request.pruned_prompt import PrunedPrompt
from framesieve.services.generation.request.request import Adapter, BlockTable, Request
from framesieve.services.generation.sampling.sampler import SamplingParams
from tests.oracle import Item, Text, expected_sequence
from tests.tiny import BLOCK_TOKENS, PAD_ID, make_plan, make_request


def video(t: int, h: int, w: int, rate: float = 0.5, stand_alone: bool = False) -> Item:
    texts = tuple(Text(tuple(range(50, 51 + i))) for i in range(t + 1)) if stand_alone else ()
    return Item(t, h, w, Fraction(3, 2), np.zeros((t * h * w, 1), np.float32), rate, texts=texts)


# The slices of the last video are separated by text; the second slice loses both tokens.
PARTS = [
    Text((10, 11, 12)),
    video(3, 2, 2),
    Text((13,)),
    video(2, 1, 3),
    video(1, 2, 2),
    Text((14, 15)),
    video(3, 1, 2, stand_alone=True),
    Text((16,)),
]
KEPT = [[0, 3, 4, 7, 9, 11], [0, 2, 5], [0, 1, 2, 3], [0, 1, 5]]


@settings(max_examples=60)
@given(st.data())
def test_gathering_in_any_order_gives_the_sequence_of_the_formulas(data: st.DataObject) -> None:
    parts: list[Text | Item] = []
    kept: list[list[int]] = []
    before: list[int] = []  # tokens before each item
    for number in range(data.draw(st.integers(0, 4))):
        if data.draw(st.booleans()):
            parts.append(Text(tuple(range(10, 10 + data.draw(st.integers(1, 5))))))
        else:
            sides = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)))
            rate, stand_alone = data.draw(st.sampled_from((0.0, 0.5, 0.9))), data.draw(st.booleans())
            parts.append(video(*sides, rate, stand_alone))
            before.append(len(expected_sequence([*parts[:-1], *parts[-1].texts[:1]], kept, PAD_ID).ids))
            order = np.random.default_rng(number).permutation(parts[-1].tokens)
            kept.append(sorted(order[: parts[-1].num_kept].tolist()))
    parts.append(Text((7,)))
    most, bounded = [len(each) for each in kept], [data.draw(st.booleans()) for _ in kept]
    kept = [
        each[: data.draw(st.integers(1, len(each)))] if some else each for each, some in zip(kept, bounded, strict=True)
    ]
    expected = expected_sequence(parts, kept, PAD_ID)
    state = PrunedPrompt(make_plan(parts), most, bounded=bounded)
    assert state.tokens == len(expected.ids) + sum(most) - sum(len(each) for each in kept)
    arrived: set[int] = set()
    for index in data.draw(st.permutations(range(len(kept)))):
        first_missing = min(set(range(len(kept))) - arrived)
        dropped = sum(most[each] - len(kept[each]) for each in range(first_missing))
        assert state.ready == before[first_missing] - dropped
        assert state.ids[: state.ready].tolist() == expected.ids[: state.ready]
        state.deliver(index, np.array(kept[index], np.int32), 1 + index)
        arrived.add(index)
    assert state.complete
    assert (state.tokens, state.delta) == (len(expected.ids), expected.delta)
    assert state.ids[: state.tokens].tolist() == expected.ids
    assert state.positions[:, : state.tokens].T.tolist() == [list(place) for place in expected.positions]


@given(st.data())
def test_gathering_part_by_part_gives_the_same_sequence(data: st.DataObject) -> None:
    """What is ready ends before the first slice that is missing, in the order of the prompt."""
    expected = expected_sequence(PARTS, KEPT, PAD_ID)
    videos = [part for part in PARTS if isinstance(part, Item)]
    state = PrunedPrompt(make_plan(PARTS), [len(each) for each in KEPT])
    arrived = [0] * len(videos)  # slices of each
    while any(slices < video.t for slices, video in zip(arrived, videos, strict=True)):
        missing = [index for index, video in enumerate(videos) if arrived[index] < video.t]
        index = data.draw(st.sampled_from(missing))
        video, slice_tokens = videos[index], videos[index].h * videos[index].w
        arrived[index] = data.draw(st.integers(arrived[index] + 1, video.t))
        tokens = arrived[index] * slice_tokens
        kept = np.array([token for token in KEPT[index] if token < tokens], np.int32)
        state.deliver(index, kept, 1 + index, tokens)
        there = [row is None or row[1] < arrived[row[0]] * videos[row[0]].h * videos[row[0]].w for row in expected.rows]
        most = there.index(False) if False in there else len(there)
        media = [place for place, row in enumerate(expected.rows[:most]) if row]
        assert (media[-1] + 1 if media else 0) <= state.ready <= most
        assert state.ids[: state.ready].tolist() == expected.ids[: state.ready]
        named = [
            (1 + row[0], row[1]) if row else (0, expected.ids[place])
            for place, row in enumerate(expected.rows[: state.ready])
        ]
        assert list(zip(*state.identities[:, : state.ready].tolist(), strict=True)) == named
    assert state.complete
    assert state.positions.T.tolist() == [list(place) for place in expected.positions]


@pytest.mark.parametrize(
    ("index", "kept", "message"),
    [
        (0, [0, 1, 2], "must keep 4 tokens"),
        (0, [1, 0, 2, 3], "must keep 4 tokens"),
        (0, [0, 1, 2, 8], "must keep 4 tokens"),
        (1, [0, 1, 2, 3], "does not exist"),
    ],
)
def test_an_item_that_contradicts_the_plan_or_comes_twice_is_refused(index: int, kept: list[int], message: str) -> None:
    state = PrunedPrompt(make_plan([video(2, 2, 2)]), [4])
    with pytest.raises(PeerContract, match=message):
        state.deliver(index, np.array(kept, np.int32), 9)
    state.deliver(0, np.array([0, 1, 2, 7], np.int32), 9)
    assert state.complete
    with pytest.raises(PeerContract, match="delivered twice"):
        state.deliver(0, np.array([0, 1, 2, 7], np.int32), 9)


def test_positions_of_an_answer_behind_the_last_position_do_not_wrap() -> None:
    request = make_request("a", [Text((5, 6))], SamplingParams(4)).request
    plan = make_plan([Text((5, 6))])
    request.prompt = PrunedPrompt(replace(plan, positions=plan.positions + np.int32(MAX_POSITION - 1)), [])
    request.output_ids += [1, 2, 3]
    positions = np.frombuffer(request.content(2, 5), np.int32)[-9:]
    assert positions.tolist() == 3 * [MAX_POSITION + 1, MAX_POSITION + 2, MAX_POSITION + 3]


ANSWER = [91, 92, 93, 94, 95]


EXPECTED = expected_sequence(PARTS, KEPT, PAD_ID)


def gathered(name: str, blocks: list[int]) -> Request:
    request = make_request(name, PARTS, SamplingParams(8)).request
    for index, kept in enumerate(KEPT):
        request.prompt.deliver(index, np.array(kept, np.int32), 1 + index)
    request.output_ids, request.blocks = list(ANSWER), BlockTable(blocks)
    return request


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, len(EXPECTED.ids) + 4), st.just(1) | st.integers(1, 30)), min_size=1, max_size=4)
)
def test_packed_chunks_are_those_of_the_formulas(cuts: list[tuple[int, int]]) -> None:
    ids = [*EXPECTED.ids, *ANSWER]
    chunks = []
    for number, (start, tokens) in enumerate(cuts):
        end = min(start + tokens, len(ids))
        request = gathered(str(number), list(range(40 * number, 40 * number + 10))[::-1])
        chunks.append(Chunk(request, start, end, samples=end % 2 == 0))
    packed, media = pack(decodes_first(chunks), BLOCK_TOKENS)
    prompt = len(EXPECTED.ids)
    answer_positions = [(prompt + i + EXPECTED.delta,) * 3 for i in range(len(ANSWER))]
    positions = [*EXPECTED.positions, *answer_positions]
    at = 0
    rows: dict[int, tuple[str, int, int]] = {}
    logit_rows: list[int] = []
    ordered = [chunk for chunk in chunks if chunk.tokens == 1] + [w for w in chunks if w.tokens > 1]
    assert packed.num_decodes == sum(chunk.tokens == 1 for chunk in chunks)
    for chunk, context in zip(ordered, packed.contexts, strict=True):
        assert (context.start, context.end) == (chunk.start, chunk.end)
        assert list(context.blocks) == [
            block for n, block in enumerate(chunk.request.blocks) if n * BLOCK_TOKENS < chunk.end
        ]
        for token in range(chunk.start, chunk.end):
            assert packed.ids[at] == ids[token]
            assert tuple(packed.positions[:, at]) == positions[token]
            block = chunk.request.blocks[token // BLOCK_TOKENS]
            assert packed.slots[at] == block * BLOCK_TOKENS + token % BLOCK_TOKENS
            if token < prompt and (source := EXPECTED.rows[token]):
                rows[at] = (chunk.request.id, source[0], KEPT[source[0]].index(source[1]))
            at += 1
        if chunk.samples:
            logit_rows.append(at - 1)
    assert packed.ids.size == at
    assert packed.logit_rows.tolist() == logit_rows
    copied = {
        each.at + n: (each.request.id, each.media_index, each.first_row + n) for each in media for n in range(each.rows)
    }
    assert copied == rows
    assert packed.media_rows.tolist() == sorted(rows)


def test_chunks_of_one_adapter_are_adjacent() -> None:
    """Within decodes and within other chunks; otherwise the order stays."""
    one, two = Adapter("one", bytes(31) + b"1"), Adapter("two", bytes(31) + b"2")
    named, tokens = (one, None, two, one, None, two, one, two, one), (2, 1, 1, 1, 1, 1, 3, 1, 1)
    chunks = []
    for number, (adapter, count) in enumerate(zip(named, tokens, strict=True)):
        request = make_request(str(number), [Text((10 + number,) * 3)], SamplingParams(1), adapter).request
        request.blocks = BlockTable([number])
        chunks.append(Chunk(request, 0, count, samples=False))
    packed, _ = pack(decodes_first(chunks), BLOCK_TOKENS)
    assert packed.num_decodes == 7
    adapted = sorted((rows.digest, packed.ids[rows.start : rows.end].tolist()) for rows in packed.adapted)
    assert adapted == [(one.digest, [10, 10, 16, 16, 16]), (one.digest, [13, 18]), (two.digest, [12, 15, 17])]


def test_ids_of_stored_vectors_are_no_text() -> None:
    plan = make_plan([Text((5, 300, 6))])
    state = PrunedPrompt(plan, [], vocab_size=300)
    assert state.ids.tolist() == [5, 300, 6]
    assert state.text_ids.tolist() == [5, -1, 6]
