"""A gateway as a real process, and requests to it."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gridsieve.client.prompt import Embeds
from gridsieve.common.process import free_port
from tests.integration.forks import Forked

START_S = 60.0


@dataclass
class Gateway:
    url: str
    port: int
    process: Forked
    log: Path

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)


@contextmanager
def gateway(
    generation: str, folder: Path, *flags: str, tls: Path | None = None, program: str | None = None
) -> Iterator[Gateway]:
    """tls: the authority that its certificate, given by flags, is of. program: as of `Service`."""
    port = free_port()
    log = folder / f"gateway-{port}.log"
    log.touch()
    process = Forked("gateway", ("--generation", generation, "--listen", f"127.0.0.1:{port}", *flags), log, program)
    found = Gateway(f"{'https' if tls else 'http'}://127.0.0.1:{port}", port, process, log)
    try:
        deadline = time.monotonic() + START_S
        while '"serving"' not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield found
    finally:
        process.kill()
        process.wait()


def data_url(kind: str, *files: bytes) -> str:
    return f"data:{kind};base64," + ",".join(base64.b64encode(file).decode() for file in files)


def question(*parts: dict[str, Any] | str, **fields: Any) -> dict[str, Any]:
    """A body: the user's parts, text as strings, answered greedily with at most 8 tokens."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8} | fields


def video(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}, **fields}


def image(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **fields}


def brought(kind: str, embeds: Embeds, **fields: Any) -> dict[str, Any]:
    """A part with embeddings. kind: its type. embeds: of bytes."""
    assert isinstance(embeds.values, bytes)
    grid, step = embeds.grid, embeds.seconds_per_slice
    value = {
        "data": base64.b64encode(embeds.values).decode(),
        "dtype": embeds.dtype,
        "shape": list(embeds.array_shape),
        "grid": {"t": grid.t, "h": grid.h, "w": grid.w},
        "seconds_per_grid": None if step is None else float(step),
        "timestamps_s": list(embeds.timestamps_s) or None,
    }
    return {"type": kind, kind: value, **fields}
