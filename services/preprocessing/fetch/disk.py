"""The disk budget of fetched media, and the files that count against it while they are open."""

from __future__ import annotations

import tempfile
import threading

from common.contract.errors import Overloaded


class DiskBudget:
    """A budget of `size_bytes` for all fetched media together. Thread-safe: any thread may close a file."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.held_bytes = 0
        self.folder = tempfile.gettempdir()
        self._lock = threading.Lock()

    def reserve(self, size_bytes: int) -> None:
        """Raises Overloaded if not enough bytes are free."""
        with self._lock:
            if self.held_bytes + size_bytes > self.size_bytes:
                raise Overloaded(
                    f"does not fit now: --fetch-disk-bytes is {self.size_bytes} for all fetched media together"
                )
            self.held_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        with self._lock:
            self.held_bytes -= size_bytes
            assert self.held_bytes >= 0, "released twice"


class FetchedFile:
    """An unnamed temporary file; closing it deletes it and releases its bytes. Raises OSError."""

    def __init__(self, disk: DiskBudget) -> None:
        self._disk = disk
        self._file = tempfile.TemporaryFile(dir=disk.folder, buffering=0)  # noqa: SIM115
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

    def close(self) -> None:
        self._file.close()
        self._disk.release(self.size_bytes)
