"""The calls of the GPU benchmark, tried on the CPU with tiny models; their rows, limits and failures."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.call import Call
from benchmarks.gpu.device import Peaks
from benchmarks.gpu.targets import TARGETS
from benchmarks.table import Row

TINY = TARGETS["tiny"]


@pytest.fixture(autouse=True)
def _services_log_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "configure_logging", lambda *_: None)


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    """A call on the CPU, with this command line."""
    where = ["--device", "cpu", "--target", "tiny", "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments, *where])
    return gpu.main()


def lines_of(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def measured(folder: Path) -> list[str]:
    """What the rows of a call name, in order. Both of its files have all of them."""
    (table,) = folder.glob("*.md")
    rows = [line["what"] for line in lines_of(folder) if "what" in line]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.read_text().splitlines() if "|" in line][
        2:
    ] == rows
    return rows


@pytest.mark.deep
def test_the_engine_call_measures_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, tmp_path, "engine") == 0
    rows = measured(tmp_path)
    decodes = [f"decode of {count} × {context} tokens" for context in TINY.contexts for count in TINY.sequences]
    prefills = [f"prefill of {tokens} tokens in chunks of {chunk}" for chunk in TINY.chunks for tokens in TINY.prompts]
    assert [row for row in rows if row in {*decodes, *prefills}] == [*decodes, *prefills]
    assert sum("all kernels" in row for row in rows) == 2
    assert all("100% of steps replayed" in line["note"] for line in lines_of(tmp_path) if line.get("what") in decodes)


@pytest.mark.deep
def test_the_tower_call_measures_graphs_forwards_and_pruning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, tmp_path, "tower") == 0
    rows = measured(tmp_path)
    for what in ("by graphs of up to", "all kernels", "evs of"):
        assert any(what in row for row in rows), what


def test_a_row_is_written_before_the_next_is_measured_and_a_failure_ends_its_part_alone(tmp_path: Path) -> None:
    def failing() -> Iterator[Row]:
        yield Row("first", "other", 1, 2, "s")
        assert measured(tmp_path) == ["first"]
        raise RuntimeError("no kernel")

    with closing(Call("engine", TINY, "tiny", torch.device("cpu"), 100, tmp_path)) as call:
        call.run("failing", failing)
        call.run("working", lambda: iter([Row("second", "other", 1, 2, "s")]))
        assert "failing failed: RuntimeError: no kernel" in call.markdown()
    assert measured(tmp_path) == ["first", "second"]


def test_what_does_not_fit_into_the_time_is_skipped_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, tmp_path, "tower", "--minutes", "0.2") == 0
    skipped = [line["skipped"] for line in lines_of(tmp_path) if "skipped" in line]
    assert skipped == ["graphs", "forwards", "kernels", "pruning"]
    (table,) = tmp_path.glob("*.md")
    assert all(f"- {each} is not measured" in table.read_text() for each in skipped)


# total_size of the published model.safetensors.index.json, over two bytes.
@pytest.mark.parametrize(("target", "parameters"), [("qwen2.5-vl-7b", 8_292_166_656), ("qwen3-vl-8b", 8_767_123_696)])
def test_targets_of_the_gpu_benchmark_have_as_many_weights_as_the_published_ones(target: str, parameters: int) -> None:
    config, model_class = TARGETS[target].layout.parts()
    with torch.device("meta"):
        model = model_class._from_config(config)
    assert sum(each.numel() for each in model.parameters()) == parameters


def test_a_roofline_is_the_slower_of_arithmetic_and_memory() -> None:
    peaks = Peaks(operations_per_s=100.0, bytes_per_s=10.0, side=1)
    assert (peaks.least_s(300, 20), peaks.least_s(100, 20)) == (3, 2)
