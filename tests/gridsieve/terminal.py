"""A terminal in which the command runs."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# The terminal controls this session: its Ctrl-C sends SIGINT.
COMMAND = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from gridsieve.__main__ import app
app()
"""
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """A terminal in which `gridsieve` runs."""

    def __init__(self, screen: int, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._screen = screen
        self._shown = b""

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def wait_for(self, text: str) -> None:
        """Waits until the text is shown, after what was waited for before."""
        deadline = time.monotonic() + 30
        while text.encode() not in self._shown:
            assert select.select([self._screen], [], [], max(0, deadline - time.monotonic()))[0], self._shown
            self._shown += os.read(self._screen, 4096)
        self._shown = self._shown.partition(text.encode())[2]

    def left(self) -> int:
        """Waits until the command ends, and returns its status."""
        with suppress(OSError):  # once nothing has the terminal open
            while shown := os.read(self._screen, 4096):
                self._shown += shown
        assert b"Traceback" not in self._shown
        return self._process.wait(30)


@contextmanager
def in_terminal(*arguments: str) -> Iterator[Terminal]:
    """Runs `gridsieve` with these arguments."""
    screen, terminal = os.openpty()
    command = [sys.executable, "-c", COMMAND, *arguments]
    environment = {**os.environ, "TERM": "dumb"}  # no control sequences
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True
    ) as process:
        os.close(terminal)
        try:
            yield Terminal(screen, process)
        finally:
            process.kill()
            os.close(screen)
