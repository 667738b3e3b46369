"""Moments travel as how long ago they were, and land on the other clock later by the way alone."""

from __future__ import annotations

from time import monotonic_ns

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contract.errors import PeerContract
from common.contract.wire import ago_s, from_ago_s


@given(ago_ns=st.integers(0, 10**15), way_ns=st.integers(0, 10**9), apart_ns=st.integers(-(10**18), 10**18))
def test_a_moment_survives_the_way_to_another_clock(ago_ns: int, way_ns: int, apart_ns: int) -> None:
    sent_ns = monotonic_ns()
    told_s = ago_s(sent_ns - ago_ns)
    heard_ns = sent_ns + apart_ns + way_ns
    # Late by the way, and early by what has passed here since the moment was fixed; floats hold it to a microsecond.
    late_ns = from_ago_s(told_s, heard_ns) - (sent_ns - ago_ns + apart_ns)
    assert way_ns - (monotonic_ns() - sent_ns) - 1000 <= late_ns <= way_ns + 1000


def test_what_is_yet_to_come_is_told_as_now() -> None:
    assert ago_s(monotonic_ns() + 10**12) == 0


@pytest.mark.parametrize("wrong_s", [-1e-9, float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_no_time_ago_breaks_the_contract(wrong_s: float) -> None:
    with pytest.raises(PeerContract):
        from_ago_s(wrong_s, 0)
