"""What SIGTERM and Ctrl-C do to a command that has started services: none of them outlives it."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from client.launcher import LocalStack
from common.exit_status import at_once

SIGTERM_STATUS = at_once(signal.SIGTERM)


def unwind_on_sigterm(status: int) -> None:
    """SIGTERM leaves the main thread's `with` blocks, as Ctrl-C does, so that no stack outlives this process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))


class DrainOnSignals:
    """From now on the first SIGTERM or Ctrl-C ends `stack.watch`, so that the stack drains, or gives up its start; the
    second ends this process and its services at once.

    first: the signal that came first; None before.
    """

    _NUMBERS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, stack: LocalStack) -> None:
        self.first: int | None = None
        self._stack = stack
        for number in self._NUMBERS:
            signal.signal(number, self._end)

    def _end(self, number: int, _: object) -> None:
        self.first = number
        for each in self._NUMBERS:
            signal.signal(each, self._end_at_once)
        self._stack.end()

    def _end_at_once(self, number: int, _: object) -> NoReturn:
        # No exception: one that comes while a process is waited for leaves its lock taken, and the next wait hangs.
        self._stack.kill_unwaited()
        os._exit(at_once(number))
