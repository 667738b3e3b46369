"""The disk budget of fetched media, and the files that count against it while they are open."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable

from gridsieve.common.contract.errors import Overloaded


class DiskBudget:
    """A budget of `size_bytes` for all fetched media together. Thread-safe: any thread may close a file.

    reclaim: called where the budget is exhausted; gives some of it up and returns True, or False if it cannot.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.held_bytes = 0
        self.folder = tempfile.gettempdir()
        self.reclaim: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()

    def reserve(self, size_bytes: int) -> None:
        """Raises Overloaded if not enough bytes are free."""
        while not self._try_reserve(size_bytes):
            if not self.reclaim():
                raise Overloaded(
                    f"does not fit now: --fetch-disk-bytes is {self.size_bytes} for all fetched media together"
                )

    def release(self, size_bytes: int) -> None:
        with self._lock:
            self.held_bytes -= size_bytes
            assert self.held_bytes >= 0, "released twice"

    def _try_reserve(self, size_bytes: int) -> bool:
        with self._lock:
            if self.held_bytes + size_bytes > self.size_bytes:
                return False
            self.held_bytes += size_bytes
            return True


class FetchedFile:
    """An unnamed temporary file. The last of its holders to close it deletes it and releases its bytes.

    Raises OSError.
    """

    def __init__(self, disk: DiskBudget) -> None:
        self._disk = disk
        self._file = tempfile.TemporaryFile(dir=disk.folder, buffering=0)  # noqa: SIM115  (the last `close` closes it)
        self._holders = 1
        self._lock = threading.Lock()
        self.size_bytes = 0

    @property
    def descriptor(self) -> int:
        return self._file.fileno()

    def write(self, piece: bytes) -> None:
        """Appends. Raises Overloaded where the budget is exhausted, OSError where the disk itself is full."""
        self._disk.reserve(len(piece))
        self.size_bytes += len(piece)
        left = memoryview(piece)
        while left:
            left = left[self._file.write(left) :]

    def share(self) -> None:
        """Adds a holder, which closes it."""
        with self._lock:
            self._holders += 1

    def close(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        self._file.close()
        self._disk.release(self.size_bytes)
