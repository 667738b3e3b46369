"""What a process ends with, of a service and of `framesieve serve` alike.

0          told to stop, and every request that ran has finished
1          a bug, or a service that ended by itself
2          it could not start as it was told to
3          told to stop, and requests that outlasted the grace were cut off
128 + n    ended at once by signal n, the second one, or one before it was ready
"""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    FINISHED = 0
    FAILED = 1
    CANNOT_START = 2
    CUT_OFF = 3


def at_once(number: int) -> int:
    """Of a process that signal `number` has ended at once."""
    return 128 + number
