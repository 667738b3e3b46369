"""Names to addresses, as the system tells them. Which of them may be dialled is in `addresses` and `policy`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial


class Names:
    """Looks up so many names at a time. A look-up that nobody waits for any more goes on until the system gives up."""

    def __init__(self, at_once: int) -> None:
        # Not the loop's own threads: those are few, and names whose servers are silent would keep them from others.
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="look-up")

    async def look_up(self, host: str) -> Sequence[str]:
        """In the order in which the system would dial. Raises OSError for a name without any."""
        ask = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))
