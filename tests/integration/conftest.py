"""Three real processes: one stack for most tests, one whose buffers hold a single item, one with the demo's model."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from client.launcher import LocalStack
from demo.checkpoint import TINY, write_checkpoint
from tests import media

KV_CACHE_TOKENS = 2048


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served"), TINY, seed=1)


@pytest.fixture(scope="session")
def media_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    (folder / "clip.mp4").write_bytes(media.clip())
    return folder


@pytest.fixture(scope="session")
def stack(checkpoint: Path, media_root: Path) -> Iterator[LocalStack]:
    flags = {"generation": ["--kv-cache-tokens", str(KV_CACHE_TOKENS)]}
    with LocalStack(checkpoint, media_root=media_root, flags=flags) as running:
        yield running


async def settles(read: Callable[[], float], target: float, within_s: float = 5) -> bool:
    """Whether what is read becomes `target` in time: gauges follow a step behind."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if await asyncio.to_thread(read) == target:
            return True
        await asyncio.sleep(0.05)
    return False


def metric(stack: LocalStack, service: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that carry `labels`; 0 where there are none yet. The metric must exist."""
    url = f"http://127.0.0.1:{stack.metrics_ports[service]}/metrics"
    with urllib.request.urlopen(url, timeout=5) as answer:
        text = answer.read().decode()
    assert f"# HELP {name.removesuffix('_count')} " in text, f"{service} has no metric {name}"
    total = 0.0
    for line in text.splitlines():
        match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
            total += float(match[2])
    return total
