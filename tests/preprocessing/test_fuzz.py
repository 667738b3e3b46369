"""Broken media end in a picture or an error that says so, never in a crash or a hang. `make fuzz` tries many more."""

from __future__ import annotations

from pathlib import Path

from services.preprocessing.sources.source import bytes_source
from tests.fuzz.mutations import mutations, originals
from tests.fuzz.run import decode, run_batch


def test_every_file_that_is_to_be_broken_is_whole_at_first() -> None:
    for name, data in originals():
        decode(bytes_source(name, data))


def test_the_same_seed_breaks_files_in_the_same_way() -> None:
    first, second = (list(mutations(3, 40)) for _ in range(2))
    assert first == second
    assert len({data for _, data in first}) == 40


def test_no_broken_file_takes_its_process_along(tmp_path: Path) -> None:
    assert run_batch(0, 100, tmp_path / "progress") is None
