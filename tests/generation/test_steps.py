"""A packed batch is the same on the other side of a socket."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.generation.parallel.steps import from_bytes, to_bytes
from services.generation.request.batch import AdaptedRows, Context, Packed

NUMBERS = st.integers(0, 2**40)
ARRAYS = st.lists(NUMBERS, max_size=5).map(lambda each: np.array(each, np.int64))


@st.composite
def packed(draw: st.DrawFn) -> Packed:
    tokens = draw(st.integers(1, 9))
    row = st.lists(NUMBERS, min_size=tokens, max_size=tokens)
    contexts = st.builds(Context, NUMBERS, NUMBERS, st.lists(NUMBERS, max_size=4))
    adapted = st.builds(AdaptedRows, st.binary(min_size=32, max_size=32), NUMBERS, NUMBERS)
    return Packed(
        contexts=tuple(draw(st.lists(contexts, min_size=1, max_size=4))),
        num_decodes=draw(NUMBERS),
        ids=np.array(draw(row)),
        positions=np.array([draw(row), draw(row), draw(row)]),
        slots=np.array(draw(row)),
        media_rows=draw(ARRAYS),
        last_rows=draw(ARRAYS),
        adapted=tuple(draw(st.lists(adapted, max_size=3))),
    )


@given(packed())
def test_what_arrives_is_what_was_packed(sent: Packed) -> None:
    found = from_bytes(to_bytes(sent))
    assert (found.contexts, found.num_decodes, found.adapted) == (sent.contexts, sent.num_decodes, sent.adapted)
    for name in ("ids", "positions", "slots", "media_rows", "last_rows"):
        array = getattr(found, name)
        assert np.array_equal(array, getattr(sent, name))
        assert array.shape == getattr(sent, name).shape
        assert array.dtype == np.int64
        assert array.flags.writeable
