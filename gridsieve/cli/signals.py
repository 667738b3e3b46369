"""Signal handling of commands: Ctrl-C, SIGTERM and a closed terminal stop the services that a command has started.

SIGINT is always handled, even if this process inherited it as ignored: a shell ignores it for the background jobs of a
script, and Python then installs no handler, so that `kill -INT` would have no effect.
SIGHUP (a closed terminal) may arrive twice, from the shell and from the kernel: only the first counts. If this process
inherited it as ignored, as under nohup, it stays ignored.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from gridsieve.common.process import at_once

if TYPE_CHECKING:
    from gridsieve.cli.launcher import LocalStack  # slow to import

Handler: TypeAlias = Callable[[int, FrameType | None], None]


def raise_on_interrupt() -> None:
    """Makes SIGINT raise KeyboardInterrupt in the main thread, even if it was inherited as ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def unwind_on_signals() -> None:
    """SIGINT, SIGTERM and SIGHUP unwind the main thread's `with` blocks, so that every started stack is stopped.

    SIGINT raises KeyboardInterrupt; the others end the process with status 128 + the signal's number.
    """

    def unwind(number: int, _: object) -> NoReturn:
        _ignore_hangups()
        sys.exit(at_once(number))

    raise_on_interrupt()
    signal.signal(signal.SIGTERM, unwind)
    _on_hangup(unwind)


class DrainOnSignals:
    """Handles signals of a process that watches a stack, from its construction on.

    The first SIGTERM, SIGINT or SIGHUP cancels the start of `stack` or ends `stack.watch`, so that the stack drains.
    A second SIGTERM or SIGINT kills the services and ends this process at once.

    first: the number of the first signal; None before it.
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
        _ignore_hangups()
        for each in self._NUMBERS:
            signal.signal(each, self._end_at_once)
        self._stack.end()

    def _end_at_once(self, number: int, _: object) -> NoReturn:
        # Not an exception: raised inside Popen.wait, it would leave Popen's lock taken and the next wait would hang.
        self._stack.kill_unwaited()
        os._exit(at_once(number))


def _on_hangup(handler: Handler) -> None:
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handler)


def _ignore_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
