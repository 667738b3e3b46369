"""Names to addresses, as the system tells them. Which of them may be dialled is in `addresses` and `policy`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Semaphore

from common.contract.errors import Overloaded


class Names:
    """Looks up so many names at a time. A look-up that nobody waits for any more goes on until the system gives up."""

    def __init__(self, at_once: int) -> None:
        # Not the loop's own threads: those are few, and names whose servers are silent would keep them from others.
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="look-up")
        self._free = Semaphore(at_once)
        self._at_once = at_once

    async def look_up(self, host: str) -> Sequence[str]:
        """In the order in which the system would dial. Raises OSError for a name without any, Overloaded for one more
        than may be looked up at a time: it could only wait for silent servers.
        """
        if not self._free.acquire(blocking=False):
            raise Overloaded(f"has a host whose name cannot be looked up now: {self._at_once} others are")
        job = self._threads.submit(partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM))
        job.add_done_callback(lambda _: self._free.release())
        found = await asyncio.wrap_future(job)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))
