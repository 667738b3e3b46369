"""A few mutated calls, and valid ones behind faulty peers, against three real processes; see `make fuzz-rpc`."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tests.fuzz.rpc import fuzz
from tests.fuzz.rpc_cases import case

CASES = 150


@pytest.mark.parametrize(
    ("kind", "code", "reason"),
    [
        ("whole", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        ("structure", grpc.StatusCode.INTERNAL, "PEER_CONTRACT"),
        ("peer", grpc.StatusCode.DEADLINE_EXCEEDED, ""),
    ],
)
def test_a_status_that_blames_the_wrong_side_is_a_fault(kind: str, code: grpc.StatusCode, reason: str) -> None:
    made = next(each for number in range(1000) if (each := case(0, number)).kind == kind)
    assert made.fault_of(code, reason)
    assert made.fault_of(grpc.StatusCode.OK, "") is None


async def test_every_fuzzed_call_ends_with_a_clear_status_and_leaves_nothing_behind(tiny_checkpoint: Path) -> None:
    report = await fuzz(tiny_checkpoint, 0, range(CASES))
    assert report.faults == []
    assert report.ends.total() == CASES
