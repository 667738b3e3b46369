"""A service that waits for ranks which never come, and is told to end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path


def ended_by_a_signal(join: str, folder: Path) -> int:
    """What a process ends with that ends with 7 on SIGTERM. join: what it runs, which meets by folder/meeting."""
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
