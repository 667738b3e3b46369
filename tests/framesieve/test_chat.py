"""`framesieve chat` in a terminal."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.framesieve.fake_services import FakeServices

# The terminal controls this session: its Ctrl-C sends SIGINT.
CHAT = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from framesieve.__main__ import app
app()
"""
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """A terminal in which `framesieve chat` runs."""

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
def chatting(address: str) -> Iterator[Terminal]:
    screen, terminal = os.openpty()
    command = [sys.executable, "-c", CHAT, "chat", "--server", address]
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


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation_which_ctrl_d_ends(
    services: FakeServices, address: str
) -> None:
    with chatting(address) as terminal:
        terminal.wait_for("> ")
        terminal.type("What moves?\n")
        terminal.wait_for("A red ball ⚽")
        terminal.wait_for("> ")
        terminal.type("hang\n")
        terminal.wait_for("A red ")
        terminal.type(CTRL_C)
        assert services.cancelled.wait(20)
        terminal.wait_for("> ")
        terminal.type("And then?\n")
        terminal.wait_for("A red ball ⚽")
        terminal.wait_for("> ")
        terminal.type(CTRL_D)
        assert terminal.left() == 0
    last = services.asked[-1].prompt.messages
    assert [message.parts[0].text for message in last] == ["What moves?", "A red ball ⚽", "And then?"]


def test_ctrl_c_at_the_prompt_leaves_with_130_and_without_a_traceback(address: str) -> None:
    with chatting(address) as terminal:
        terminal.wait_for("> ")
        # Readline notices a signal that comes just before it waits for a key only after the line.
        terminal.type(f"What{CTRL_C}\n")
        assert terminal.left() == 130
