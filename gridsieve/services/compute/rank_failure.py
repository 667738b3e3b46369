"""The end of a rank that was not asked to end: it ends the service, and the error names the rank and how it ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Event

import structlog

from gridsieve.common.process import ExitStatus

# Within so long after its connections break, the end of a process is reported.
_REPORTED_WITHIN_S = 2.0

log = structlog.get_logger()


class RankFailure:
    """cause: which rank ended, and how; None while all ranks run."""

    def __init__(self) -> None:
        self.cause: str | None = None
        self._recorded = Event()
        self._on_failure: Callable[[], object] | None = None

    def watch(self, on_failure: Callable[[], object]) -> None:
        """Calls `on_failure` on a failure, in another thread. A failure before this call ends the process."""
        self._on_failure = on_failure

    def record(self, cause: str) -> None:
        """Records a failure; called from the thread that watches the ranks."""
        self.cause = cause
        self._recorded.set()
        if self._on_failure is None:  # os._exit: other threads may wait for that rank for ever
            log.error("cannot start", error=cause)
            os._exit(ExitStatus.CANNOT_START)
        log.error("a rank is lost, and the service ends", error=cause)
        self._on_failure()

    def wait(self) -> bool:
        """Whether a failure is recorded; waits a moment for it, as broken connections are noticed first."""
        return self._recorded.wait(_REPORTED_WITHIN_S)
