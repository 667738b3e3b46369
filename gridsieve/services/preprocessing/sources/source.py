"""Opened media: bytes of the request, a file below the media root or the root of uploads, or a fetched file.

It decides which paths may be opened. It knows nothing of formats: `packets` and `pictures` read the content.
A file stays open from planning to the last frame, so the file that was planned is the file that is decoded.
"""

from __future__ import annotations

import errno
import hashlib
import io
import math
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from gridsieve.common.contract.errors import MediaForbidden, MediaRejected, Overloaded
from gridsieve.common.sealed_memory import SealedMemory
from gridsieve.services.preprocessing.sources.digests import Digests, digest_of, digests

_READ_BYTES = 2**20
_HEAD_BYTES = 64

_RESOURCE_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class Source:
    """Opened media: a name for error texts, the sha256 of the bytes, and the descriptor of the file that holds them.

    on_close: called instead of closing the descriptor, where there is more to release.
    begin, end: the bytes of the file that are the media; without an end, up to that of the file.
    """

    name: str
    digest: bytes
    descriptor: int
    on_close: Callable[[], None] | None = field(default=None, repr=False)
    begin: int = 0
    end: int | None = None

    def part(self, name: str, begin: int, end: int) -> Source:
        """Some bytes of the file as media of their own, without a digest. Only the whole source is closed."""
        return Source(name, b"", self.descriptor, begin=begin, end=end)

    @property
    def head(self) -> bytes:
        """The first bytes."""
        return os.pread(self.descriptor, _HEAD_BYTES, self.begin)

    def open(self) -> BinaryIO:
        """A new reader at the first byte. Readers have their own offsets, so several may read at once."""
        return io.BufferedReader(_Pread(self.descriptor, self.begin, self.end), _READ_BYTES)

    def close(self) -> None:
        """Closes the descriptor. Readers must be done."""
        if self.on_close is not None:
            self.on_close()
        else:
            os.close(self.descriptor)


class _Pread(io.RawIOBase):
    """Reads a shared descriptor from `begin` to `end` at its own offset. Closing it leaves the descriptor open."""

    def __init__(self, descriptor: int, begin: int, end: int | None) -> None:
        self._descriptor = descriptor
        self._begin = begin
        self._end = end
        self._offset = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # any Buffer is more than `open` brings
        # A slice of a bytearray, which `read` brings, would be a copy.
        wanted = memoryview(buffer)[: None if self._end is None else max(0, self._size() - self._offset)]
        count = os.preadv(self._descriptor, [wanted], self._begin + self._offset)
        self._offset += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset}.get(whence)
        self._offset = offset + (self._size() if start is None else start)
        return self._offset

    def _size(self) -> int:
        end = os.fstat(self._descriptor).st_size if self._end is None else self._end
        return end - self._begin

    def tell(self) -> int:
        return self._offset


@contextmanager
def resource_errors_as_overloaded(name: str) -> Iterator[None]:
    """Maps OSErrors from exhausted descriptors, memory or disk to Overloaded: they are not the media's fault."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno in _RESOURCE_ERRORS:
                raise Overloaded(f"cannot be opened now: {os.strerror(cause.errno)}", field=name) from error
            cause = cause.__cause__ or cause.__context__
        raise


def bytes_source(name: str, data: bytes) -> Source:
    """Media bytes of the request, in sealed memory that workers can map. The memory is freed with the source.

    Raises MediaRejected for no bytes, Overloaded where the machine is out of descriptors or memory.
    """
    if not data:
        raise MediaRejected("is empty", field=f"{name}.data")
    received = ReceivedFile(name)
    received.write(data)
    return received.source()


class ReceivedFile:
    """A media file that arrives with the request, collected in memory that workers can map.

    It must be closed unless `source` was called. Raises Overloaded where the machine is out of descriptors or memory.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._digest = hashlib.sha256()
        with resource_errors_as_overloaded(f"{name}.data"):
            self._memory = SealedMemory()

    def write(self, piece: bytes) -> None:
        self._digest.update(piece)
        with resource_errors_as_overloaded(f"{self._name}.data"):
            self._memory.write(memoryview(piece))

    def source(self) -> Source:
        """The whole file. Closing the source frees the memory."""
        self._memory.seal()
        return Source(self._name, self._digest.digest(), self._memory.descriptor, self._memory.close)

    def close(self) -> None:
        self._memory.close()


def path_source(
    name: str,
    path: str,
    root: Path | None,
    check_cancelled: Callable[[], None] = lambda: None,
    max_bytes: float = math.inf,
    known: Digests | None = None,
    field: str = "path",
    flag: str = "--media-root",
) -> Source:
    """A file below `root`, symlinks resolved. The caller closes it.

    path: relative to the root, or absolute and below it. check_cancelled: called between the blocks that are hashed;
    an exception from it ends the read. max_bytes: a larger file is rejected unread. known: of files that were hashed
    before. field: which names the path, flag: which names the root, for error texts.
    Raises MediaForbidden for a path outside the root, whether it exists or not; MediaRejected for a file that is not
    readable, not regular or too large; Overloaded where the machine is out of descriptors or memory.
    """
    field = f"{name}.{field}"
    if root is None:
        raise MediaForbidden(f"is {path!r}, but this service was started without {flag}", field=field)
    if not path or "\0" in path:
        raise MediaRejected(field=field, limit=f"a path below {flag}", value=path)
    with resource_errors_as_overloaded(field):
        descriptor = _opened(field, path, root.resolve(), flag)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise MediaRejected(f"{path!r} is not a regular file", field=field)
            check_file_size(name, descriptor, max_bytes)
            return Source(name, digest_of(descriptor, known or digests(), check_cancelled), descriptor)
        except BaseException:
            os.close(descriptor)
            raise


def check_file_size(name: str, descriptor: int, max_bytes: float) -> None:
    """Raises MediaRejected for a file of more than `max_bytes`."""
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes > max_bytes:
        text = f"has {size_bytes} bytes, at most {max_bytes} are allowed"
        raise MediaRejected(text, field=name, value=size_bytes, limit=max_bytes)


def _opened(field: str, path: str, root: Path, flag: str) -> int:
    """The descriptor of a file below the root. field, flag: as in `path_source`."""
    try:
        resolved = (root / path).resolve()
    except (OSError, RuntimeError) as error:
        raise MediaForbidden(f"{path!r} cannot be resolved", field=field) from error
    if not resolved.is_relative_to(root):
        raise MediaForbidden(f"{path!r} lies outside {flag}", field=field)
    try:
        # O_NONBLOCK: opening a pipe would block the thread.
        return os.open(resolved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise MediaRejected(f"{path!r} cannot be read below {flag}: {error.strerror}", field=field) from error
