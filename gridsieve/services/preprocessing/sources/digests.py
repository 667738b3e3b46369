"""Digests of files. They are kept for as long as a file shows no sign of change, so it is hashed once."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from typing import TypeAlias

from gridsieve.services.preprocessing.sources.last_used import LastUsed

_READ_BYTES = 2**20
_MAX_FILES = 2**14
# A file that was changed less than this ago may change again within the same tick of its file system's clock.
_SETTLED_S = 2.0

Digests: TypeAlias = LastUsed[tuple[int, ...], bytes]


def digests(on_get: Callable[[bool], None] = lambda _: None) -> Digests:
    """An empty cache of digests, by what changes with a file: device, inode, size, and times of change."""
    return LastUsed(_MAX_FILES, on_get=on_get)


def digest_of(descriptor: int, known: Digests, check_cancelled: Callable[[], None] = lambda: None) -> bytes:
    """The sha256 of a file. check_cancelled: called between its blocks; an exception from it ends the read."""
    signs = _signs(descriptor)
    found = known.get(signs)
    if found is not None:
        return found
    settled = time.time_ns() - max(signs[-2:]) > _SETTLED_S * 1e9
    digest, offset = hashlib.sha256(), 0
    while piece := os.pread(descriptor, _READ_BYTES, offset):
        check_cancelled()
        digest.update(piece)
        offset += len(piece)
    if settled and _signs(descriptor) == signs:
        known.put(signs, digest.digest())
    return digest.digest()


def _signs(descriptor: int) -> tuple[int, ...]:
    stat = os.fstat(descriptor)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
