"""That a rank has ended unasked: it ends the service, and callers are told which rank it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Event

import structlog

from common.contract.errors import Unavailable
from common.process import ExitStatus

# By then the end of a process whose connections are broken is known.
_KNOWN_S = 2.0

log = structlog.get_logger()


class Loss:
    """lost: which rank, and how it ended; None while all are there."""

    def __init__(self) -> None:
        self.lost: str | None = None
        self._known = Event()
        self._on_lost: Callable[[], object] | None = None

    def watch(self, on_lost: Callable[[], object]) -> None:
        """From now on a loss is told, in a thread of its own; before, it ends the process, which has yet to start."""
        self._on_lost = on_lost

    def note(self, lost: str) -> None:
        self.lost = lost
        self._known.set()
        if self._on_lost is None:  # other threads may wait for that rank for ever
            log.error("cannot start", error=f"of the tower, {lost}")
            os._exit(ExitStatus.CANNOT_START)
        log.error("a rank is lost, and the service ends", error=lost)
        self._on_lost()

    def known(self) -> bool:
        """Whether one is lost, as one soon is whose connections are broken."""
        return self._known.wait(_KNOWN_S)

    @property
    def error(self) -> Unavailable:
        """What callers are told."""
        return Unavailable(f"the tower of the encoder has ended: {self.lost}", "encoder")
