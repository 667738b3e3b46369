"""Two signals while the loop of a service stands still: the second is not lost."""

from __future__ import annotations

import signal
import subprocess
import sys

SERVICE = """
import asyncio, time
from common.serving import server
from common.process import ExitStatus

async def main():
    stopping = server._first_signal()
    asyncio.get_running_loop().call_soon(stand_still)
    await stopping.wait()
    print("drains", flush=True)
    await asyncio.sleep(60)
    return ExitStatus.FINISHED

def stand_still():
    print("stands still", flush=True)
    for _ in range(2):
        server.os.kill(server.os.getpid(), server.signal.SIGTERM)
        time.sleep(0.01)
    print("goes on", flush=True)

server.run(main)
"""


def test_the_second_of_two_signals_ends_a_service_whose_loop_stands_still() -> None:
    ended = subprocess.run([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, text=True, timeout=30, check=False)
    assert ended.returncode == 128 + signal.SIGTERM
    assert ended.stdout == "stands still\n"
