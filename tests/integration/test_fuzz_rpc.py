"""A thousand mutated calls, and whole ones behind bent peers, against three real processes (`make fuzz-rpc`: more)."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tests.fuzz.rpc import fuzz
from tests.fuzz.rpc_cases import case

CASES = 1000


def test_the_same_seed_makes_the_same_calls() -> None:
    first, second, other = ([case(seed, number) for number in range(200)] for seed in (3, 3, 4))
    assert first == second
    assert first != other
    assert {each.kind for each in first} == {"structure", "bytes", "order", "leaving", "peer", "whole"}


@pytest.mark.parametrize(
    ("kind", "code", "reason"),
    [
        ("whole", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        ("structure", grpc.StatusCode.INTERNAL, "PEER_CONTRACT"),
        ("structure", grpc.StatusCode.UNKNOWN, ""),
        ("bytes", grpc.StatusCode.CANCELLED, ""),
        ("order", grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"),
        ("peer", grpc.StatusCode.INTERNAL, "INTERNAL"),
        ("peer", grpc.StatusCode.DEADLINE_EXCEEDED, ""),
    ],
)
def test_an_end_that_blames_the_wrong_one_is_a_fault(kind: str, code: grpc.StatusCode, reason: str) -> None:
    made = next(each for number in range(1000) if (each := case(0, number)).kind == kind)
    assert made.fault_of(code, reason)
    assert made.fault_of(grpc.StatusCode.OK, "") is None


async def test_whatever_is_sent_and_answered_has_a_clear_end_and_leaves_nothing(checkpoint: Path) -> None:
    report = await fuzz(checkpoint, 0, range(CASES))
    assert report.faults == []
    assert report.ends.total() == CASES
