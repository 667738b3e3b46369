"""Digests of several parts, such that no two inputs pass for one another."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import TypeAlias

Bytes: TypeAlias = bytes | bytearray | memoryview


def tagged_digest(domain: bytes, parts: Sequence[Bytes]) -> bytes:
    """sha256 of a domain and parts, how many there are and each behind its length: none can pass for two others."""
    digest = hashlib.sha256()
    for part in (domain, struct.pack("<q", len(parts)), *parts):
        digest.update(struct.pack("<q", len(part)))
        digest.update(part)
    return digest.digest()
