"""Whom a load asks: a server that is named, the one on this machine, or services that are started for the run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from framesieve.cli.launcher import LocalStack, listens
from framesieve.cli.signals import unwind_on_signals
from framesieve.cli.terminal import stderr
from framesieve.client.client import DEFAULT_ADDRESS


@dataclass(frozen=True, slots=True)
class Target:
    """Generation's address, what the report says of it, and the addresses of the services' /metrics."""

    address: str
    told: str
    metrics: tuple[str, ...]


@contextlib.contextmanager
def served(server: str | None, start: bool, model: Path | None, metrics: Sequence[str]) -> Iterator[Target]:
    """Services are there until the context is left; what was started is stopped then. Raises StartupError."""
    if server is not None or not (start or model is not None or not listens(DEFAULT_ADDRESS)):
        address = server or DEFAULT_ADDRESS
        yield Target(address, address, tuple(metrics))
        return
    unwind_on_signals()
    stack = LocalStack(model)
    with stderr.status("starting three services …"):
        stack.start()
    try:
        told = f"three services started for this run, {model or 'the embedded model'}"
        yield Target(stack.address, told, tuple(f"127.0.0.1:{port}" for port in stack.metrics_ports.values()))
    finally:
        stack.stop()
