"""What SIGTERM, Ctrl-C and a terminal that is closed do to a command that has started services: none outlives it.

Closing a terminal is SIGHUP, which may come more than once, from the shell and from the system: the first counts. Where
it is ignored when the command starts, as by nohup, it stays so.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, TypeAlias

from common.process import at_once
from framesieve.cli.launcher import LocalStack

Handler: TypeAlias = Callable[[int, FrameType | None], None]


def unwind_on_signals() -> None:
    """SIGTERM and SIGHUP leave the main thread's `with` blocks, as Ctrl-C does, so that no stack outlives this process,
    which ends with 128 and the signal's number.
    """

    def unwind(number: int, _: object) -> NoReturn:
        _spare_hangups()
        sys.exit(at_once(number))

    signal.signal(signal.SIGTERM, unwind)
    _on_hangup(unwind)


class DrainOnSignals:
    """From now on the first SIGTERM, Ctrl-C or SIGHUP ends `stack.watch`, so that the stack drains, or gives up its
    start; a second SIGTERM or Ctrl-C ends this process and its services at once.

    first: the signal that came first; None before.
    """

    _NUMBERS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, stack: LocalStack) -> None:
        self.first: int | None = None
        self._stack = stack
        for number in self._NUMBERS:
            signal.signal(number, self._end)
        _on_hangup(self._end)

    def _end(self, number: int, _: object) -> None:
        self.first = number
        _spare_hangups()
        for each in self._NUMBERS:
            signal.signal(each, self._end_at_once)
        self._stack.end()

    def _end_at_once(self, number: int, _: object) -> NoReturn:
        # No exception: one that comes while a process is waited for leaves its lock taken, and the next wait hangs.
        self._stack.kill_unwaited()
        os._exit(at_once(number))


def _on_hangup(handler: Handler) -> None:
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handler)


def _spare_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
