"""The disk that fetched media lie on: how many bytes they may take together, and files that are counted while open."""

from __future__ import annotations

import tempfile
import threading

from common.contract.errors import Overloaded


class Disk:
    """Room for `size_bytes` of fetched media. Files grow in the loop's thread and are closed in any."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.held_bytes = 0
        self.folder = tempfile.gettempdir()
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> None:
        """Raises Overloaded where that many bytes are not free."""
        with self._lock:
            if self.held_bytes + size_bytes > self.size_bytes:
                raise Overloaded(f"finds no room: fetched media may take {self.size_bytes} bytes together")
            self.held_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self.held_bytes -= size_bytes
            assert self.held_bytes >= 0, "given back twice"


class FetchedFile:
    """A file without a name, which is gone and no longer counted once it is closed. Raises OSError."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._file = tempfile.TemporaryFile(dir=disk.folder, buffering=0)  # noqa: SIM115
        self.size_bytes = 0

    @property
    def descriptor(self) -> int:
        return self._file.fileno()

    def write(self, piece: bytes) -> None:
        """Appends. Raises Overloaded where the disk has no room, OSError where the system has none."""
        self._disk.take(len(piece))
        self.size_bytes += len(piece)
        left = memoryview(piece)
        while left:
            left = left[self._file.write(left) :]

    def close(self) -> None:
        self._file.close()
        self._disk.give_back(self.size_bytes)
