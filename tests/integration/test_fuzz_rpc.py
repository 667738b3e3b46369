"""A few mutated calls, and valid ones behind faulty peers, against three real processes; see `make fuzz-rpc`."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.rpc import fuzz

CASES = 150


async def test_every_fuzzed_call_ends_with_a_clear_status_and_leaves_nothing_behind(tiny_checkpoint: Path) -> None:
    report = await fuzz(tiny_checkpoint, 0, range(CASES))
    assert report.faults == []
    assert report.ends.total() == CASES
