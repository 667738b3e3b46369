"""Plans and prunings through protobuf: what goes in comes out, and a pruning outside its range is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contract import wire
from common.contract.errors import InvalidRequest
from common.contract.plan import Grid
from common.contract.retention import Pruning
from common.contract.tensors import PIECE_BYTES
from framesieve.v1 import prompt_pb2
from tests.common.wire_plans import plan_of, receive, video


@given(before=st.integers(0, 5), t=st.integers(1, 4), h=st.integers(1, 4), w=st.integers(1, 4), after=st.integers(0, 5))
def test_a_plan_survives_the_wire(before: int, t: int, h: int, w: int, after: int) -> None:
    item = video(before, Grid(t, h, w))
    sent = plan_of(before + item.grid.tokens + after, item)
    received = receive(list(wire.plan_messages(sent)))
    assert received is not None
    assert np.array_equal(received.input_ids, sent.input_ids)
    assert np.array_equal(received.positions, sent.positions)
    assert (received.media, received.embed_levels, received.fingerprint) == (sent.media, 0, b"f" * 32)


def test_a_plan_of_128_k_tokens_is_sent_in_messages_of_a_piece_each() -> None:
    sent = plan_of(128 * 1024)
    messages = list(wire.plan_messages(sent))
    assert [len(message.layout.data) for message in messages] == [PIECE_BYTES, PIECE_BYTES]
    received = receive(messages)
    assert received is not None
    assert np.array_equal(received.positions, sent.positions)


def test_an_items_own_pruning_overrides_the_requests() -> None:
    prompt = prompt_pb2.Prompt(
        messages=[
            prompt_pb2.Message(
                parts=[
                    prompt_pb2.Part(
                        video=prompt_pb2.Media(pruning=prompt_pb2.Pruning(rate=0.5, method="random", seed=0))
                    ),
                    prompt_pb2.Part(text="and"),
                    prompt_pb2.Part(image=prompt_pb2.Media()),
                ]
            ),
            prompt_pb2.Message(parts=[prompt_pb2.Part(video=prompt_pb2.Media())]),
        ]
    )
    shared = Pruning(rate=0.75)
    assert wire.prunings_of(prompt, prompt_pb2.Pruning(rate=0.75)) == (Pruning(0.5, "random", 0), shared, shared)
    assert wire.prunings_of(prompt, prompt_pb2.Pruning())[1] == Pruning(rate=0.0)


@pytest.mark.parametrize(
    ("pruning", "says"),
    [
        (prompt_pb2.Pruning(rate=1.0), "below 1, got 1.0"),
        (prompt_pb2.Pruning(rate=-0.1), "got -0.1"),
        (prompt_pb2.Pruning(rate=float("nan")), "got nan"),
        (prompt_pb2.Pruning(method="best"), "'best' does not exist, the methods are evs, vidcom2, random, none"),
        (prompt_pb2.Pruning(method="random", seed=-1), "got -1"),
    ],
)
def test_a_pruning_outside_its_range_names_field_value_and_limit(pruning: prompt_pb2.Pruning, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        wire.pruning_of(pruning)


def test_an_items_own_pruning_outside_its_range_is_named_with_its_place() -> None:
    own = prompt_pb2.Part(video=prompt_pb2.Media(pruning=prompt_pb2.Pruning(rate=1.5)))
    prompt = prompt_pb2.Prompt(messages=[prompt_pb2.Message(parts=[prompt_pb2.Part(text="this"), own])])
    with pytest.raises(InvalidRequest, match=r"^prompt\.messages\[0\]\.parts\[1\]\.video\.pruning\.rate .* got 1\.5"):
        wire.prunings_of(prompt, prompt_pb2.Pruning())
