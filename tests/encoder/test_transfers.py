"""Readback copies on a stream of its own. tests/gpu/test_pruning_on_cuda.py runs it on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.encoder.tower.transfers import Readback


def test_readback_waits_for_earlier_work_and_not_for_later_work(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    stream = SimpleNamespace(wait_stream=lambda other: done.append(f"wait for {other}"))
    event = SimpleNamespace(record=lambda on: done.append("record"), synchronize=lambda: done.append("synchronise"))
    copied = SimpleNamespace(copy_=lambda source, non_blocking: done.append(f"copy without blocking: {non_blocking}"))

    @contextmanager
    def use(used: Any) -> Iterator[None]:
        assert used is stream
        done.append("use the copy stream")
        yield
        done.append("leave the copy stream")

    fakes = {"Stream": lambda _: stream, "Event": lambda blocking: event, "stream": use}
    for name, fake in {**fakes, "current_stream": lambda _: "the tower's stream"}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: copied if pin_memory else None)
    source: Any = SimpleNamespace(device=torch.device("cuda"), shape=(2,), dtype=torch.float32)
    reading = Readback(source)
    copying = ["use the copy stream", "copy without blocking: True", "record", "leave the copy stream"]
    assert done == ["wait for the tower's stream", *copying]
    assert reading.wait() == [copied]
    assert done[5:] == ["synchronise"]
