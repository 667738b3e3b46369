"""The pruned prompt is gathered item by item; its length and delta are known before any item arrives."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.contract.errors import PeerContract
from common.contract.plan import MAX_POSITION
from services.generation.request.rope import RopeState
from services.generation.sampling.sampler import SamplingParams
from tests.oracle import Item, Text, expected_sequence
from tests.tiny import PAD_ID, make_plan, make_request


def video(t: int, h: int, w: int, rate: float = 0.5, stand_alone: bool = False) -> Item:
    texts = tuple(Text(tuple(range(50, 51 + i))) for i in range(t + 1)) if stand_alone else ()
    return Item(t, h, w, Fraction(3, 2), np.zeros((t * h * w, 1), np.float32), rate, texts=texts)


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
            kept.append(sorted(order[: parts[-1].kept_count].tolist()))
    parts.append(Text((7,)))
    expected = expected_sequence(parts, kept, PAD_ID)
    state = RopeState(make_plan(parts), [len(each) for each in kept])
    assert state.tokens == len(expected.ids)
    assert state.delta == expected.delta
    arrived: set[int] = set()
    for index in data.draw(st.permutations(range(len(kept)))):
        first_missing = min(set(range(len(kept))) - arrived)
        assert state.ready == before[first_missing]
        assert state.ids[: state.ready].tolist() == expected.ids[: state.ready]
        state.deliver(index, np.array(kept[index], np.int32), 1 + index)
        arrived.add(index)
    assert state.complete
    assert state.ids.tolist() == expected.ids
    assert state.positions.T.tolist() == [list(place) for place in expected.positions]


@pytest.mark.parametrize(
    ("index", "kept", "message"),
    [
        (0, [0, 1, 2], "must keep 4 tokens"),
        (0, [1, 0, 2, 3], "must keep 4 tokens"),
        (0, [-1, 0, 1, 2], "must keep 4 tokens"),
        (0, [0, 1, 2, 8], "must keep 4 tokens"),
        (1, [0, 1, 2, 3], "does not exist"),
    ],
)
def test_an_item_that_contradicts_the_plan_or_comes_twice_is_refused(index: int, kept: list[int], message: str) -> None:
    state = RopeState(make_plan([video(2, 2, 2)]), [4])
    with pytest.raises(PeerContract, match=message):
        state.deliver(index, np.array(kept, np.int32), 9)
    state.deliver(0, np.array([0, 1, 2, 7], np.int32), 9)
    assert state.complete
    with pytest.raises(PeerContract, match="delivered twice"):
        state.deliver(0, np.array([0, 1, 2, 7], np.int32), 9)


def test_positions_of_an_answer_behind_the_last_position_do_not_wrap() -> None:
    request = make_request("a", [Text((5, 6))], SamplingParams(4)).request
    plan = make_plan([Text((5, 6))])
    request.rope = RopeState(replace(plan, positions=plan.positions + np.int32(MAX_POSITION - 1)), [])
    request.output_ids += [1, 2, 3]
    positions = np.frombuffer(request.content(2, 5), np.int32)[-9:]
    assert positions.tolist() == 3 * [MAX_POSITION + 1, MAX_POSITION + 2, MAX_POSITION + 3]
