"""Where media come from: bytes in the request, a file below the media root, or one that was fetched.

It owns which paths may be reached. It knows nothing of formats: `packets` and `pictures` find out what a source holds.
A file stays open from planning to the last frame, so that what was planned is what is decoded.
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
from functools import partial
from pathlib import Path
from typing import BinaryIO

from common.contract.errors import MediaForbidden, MediaRejected, Overloaded
from services.preprocessing.sources.memory import SealedMemory

_READ_BYTES = 2**20

_OWN_LACK = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class Source:
    """Opened media: a name for messages, sha256 of its bytes, and the descriptor of what holds them.

    on_close: gives the descriptor back, where more than closing it is to be done.
    """

    name: str
    digest: bytes
    descriptor: int
    on_close: Callable[[], None] | None = field(default=None, repr=False)

    def open(self) -> BinaryIO:
        """A reader of its own at the first byte; several may read at once."""
        return io.BufferedReader(_Pread(self.descriptor), _READ_BYTES)

    def close(self) -> None:
        """Gives the descriptor back. Readers must be done."""
        if self.on_close is not None:
            self.on_close()
        else:
            os.close(self.descriptor)


class _Pread(io.RawIOBase):
    """Reads a shared descriptor at an offset of its own; the descriptor outlives it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._offset = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = os.preadv(self._descriptor, [buffer], self._offset)
        self._offset += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset}.get(whence)
        self._offset = offset + (os.fstat(self._descriptor).st_size if start is None else start)
        return self._offset

    def tell(self) -> int:
        return self._offset


@contextmanager
def own_lack_told(name: str) -> Iterator[None]:
    """Raises Overloaded for what came of descriptors, memory or disk that this machine lacks: the media may be good."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno in _OWN_LACK:
                raise Overloaded(f"{name} cannot be opened now: {os.strerror(cause.errno)}") from error
            cause = cause.__cause__ or cause.__context__
        raise


def bytes_source(name: str, data: bytes) -> Source:
    """Media that came with the request, in memory that workers share. It is given back with the source if not before.

    Raises MediaRejected if there are none, Overloaded where descriptors or memory lack.
    """
    if not data:
        raise MediaRejected(f"{name}.data is empty")
    with own_lack_told(f"{name}.data"):
        memory = SealedMemory(memoryview(data))
    return Source(name, hashlib.sha256(data).digest(), memory.descriptor, memory.close)


def path_source(
    name: str,
    path: str,
    media_root: Path | None,
    check_wanted: Callable[[], None] = lambda: None,
    max_bytes: float = math.inf,
) -> Source:
    """A file below `media_root`, symlinks resolved. The caller closes it.

    path: relative to the root, or absolute and below it. check_wanted: called while the file is read, which may take
    long; what it raises ends that. max_bytes: of the file, which is not read if it has more.
    Raises MediaForbidden for what lies outside, whether it exists or not; MediaRejected for what is no readable file
    or too large; Overloaded where descriptors or memory lack.
    """
    if media_root is None:
        raise MediaForbidden(f"{name}.path is {path!r}, but this service was started without --media-root")
    if not path or "\0" in path:
        raise MediaRejected(f"{name}.path must be a path below --media-root, got {path!r}")
    with own_lack_told(f"{name}.path"):
        return _file_source(name, path, media_root.resolve(), check_wanted, max_bytes)


def check_file_size(name: str, descriptor: int, max_bytes: float) -> None:
    """Raises MediaRejected for a file of more than `max_bytes`."""
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes > max_bytes:
        raise MediaRejected(f"{name} has {size_bytes} bytes, at most {max_bytes} are allowed")


def _file_source(name: str, path: str, root: Path, check_wanted: Callable[[], None], max_bytes: float) -> Source:
    try:
        resolved = (root / path).resolve()
    except (OSError, RuntimeError) as error:
        raise MediaForbidden(f"{name}.path {path!r} cannot be resolved") from error
    if not resolved.is_relative_to(root):
        raise MediaForbidden(f"{name}.path {path!r} lies outside --media-root")
    try:
        # Without blocking, or a pipe below the root would hang the thread.
        descriptor = os.open(resolved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise MediaRejected(f"{name}.path {path!r} cannot be read: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise MediaRejected(f"{name}.path {path!r} is no file")
        check_file_size(name, descriptor, max_bytes)
        return Source(name, _digest(descriptor, check_wanted), descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _digest(descriptor: int, check_wanted: Callable[[], None]) -> bytes:
    digest = hashlib.sha256()
    reader = io.BufferedReader(_Pread(descriptor), _READ_BYTES)
    for piece in iter(partial(reader.read, _READ_BYTES), b""):
        check_wanted()
        digest.update(piece)
    return digest.digest()
