"""A process that waits for ranks that never join, and gets SIGTERM."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path


def ended_by_a_signal(join: str, folder: Path) -> int:
    """The exit status of a process that runs `join` and gets SIGTERM, on which it exits with 7.

    join: code that meets by the file folder/meeting.
    """
    program = f"""
import os, signal, torch
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
{join}
"""
    with subprocess.Popen([sys.executable, "-c", program]) as service:
        try:
            end = time.monotonic() + 60
            while not (folder / "meeting").exists():
                assert time.monotonic() < end
                assert service.poll() is None
                time.sleep(0.02)
            time.sleep(0.2)
            service.send_signal(signal.SIGTERM)
            return service.wait(20)
        finally:
            service.kill()
