"""Fetched bodies that are kept for the next request of the same URL, by the rules of HTTP for shared caches.

A body is kept if its response allows it and has a maximum age or a validator. Within its age it is taken as it is;
later the server is asked whether it has changed. A URL with another query, such as another signature, is another URL.
Bodies count against the disk budget, and make room for fetches that need it.
Source: RFC 9111, 3 (storing), 4.2 (freshness) and 4.3 (validation).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from gridsieve.services.preprocessing.fetch.disk import DiskBudget, FetchedFile

# Each holds a descriptor, and processes are often limited to 1024.
_MAX_BODIES = 256
_MAX_AGE_S = 2**31
# Responses that are for one caller, or must not be kept.
_NEVER = ("no-store", "private")


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms a response may be kept. conditions: headers that ask whether it has changed."""

    fresh_until_s: float
    conditions: Mapping[str, str]

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Self | None:
        """None for a response that may not be kept, or would never be used again."""
        directives = _directives(headers.get("Cache-Control", ""))
        if any(name in directives for name in _NEVER) or headers.get("Vary", "").strip() == "*":
            return None
        age_s = _seconds(directives.get("s-maxage", directives.get("max-age", ""))) - _seconds(headers.get("Age", ""))
        fresh_s = 0 if "no-cache" in directives else max(0, age_s)
        validators = {"If-None-Match": headers.get("ETag"), "If-Modified-Since": headers.get("Last-Modified")}
        conditions = {name: value for name, value in validators.items() if value}
        return cls(time.monotonic() + fresh_s, conditions) if fresh_s or conditions else None


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """A fetched body and its sha256."""

    file: FetchedFile
    digest: bytes
    terms: Terms | None = None

    @property
    def is_fresh(self) -> bool:
        return self.terms is not None and time.monotonic() < self.terms.fresh_until_s

    @property
    def conditions(self) -> Mapping[str, str]:
        return self.terms.conditions if self.terms else {}


class BodyCache:
    """Bodies by URL. Thread-safe."""

    def __init__(self, disk: DiskBudget) -> None:
        self._bodies: OrderedDict[str, Body] = OrderedDict()
        self._lock = threading.RLock()
        disk.reclaim = self._drop_oldest

    def find(self, url: str) -> Body | None:
        """The body of a URL, whose file the caller closes."""
        with self._lock:
            found = self._bodies.get(url)
            if found is not None:
                self._bodies.move_to_end(url)
                found.file.share()
            return found

    def keep(self, url: str, body: Body) -> None:
        """Keeps the body instead of an older one, if its terms allow it. The caller's file stays open."""
        with self._lock:
            replaced = self._bodies.pop(url, None)
            if body.terms is not None:
                body.file.share()
                self._bodies[url] = body
            if replaced is not None:
                replaced.file.close()
            if len(self._bodies) > _MAX_BODIES:
                self._drop_oldest()

    def close(self) -> None:
        """Drops all bodies."""
        while self._drop_oldest():
            pass

    def _drop_oldest(self) -> bool:
        """Drops the body that was used longest ago. Returns False if there is none."""
        with self._lock:
            if not self._bodies:
                return False
            self._bodies.popitem(last=False)[1].file.close()
            return True


def _directives(text: str) -> dict[str, str]:
    """Cache-Control's directives in lower case, with their values, which may be empty."""
    parts = (part.partition("=") for part in text.split(","))
    return {name.strip().lower(): value.strip().strip('"') for name, _, value in parts}


def _seconds(text: str) -> int:
    return min(int(text), _MAX_AGE_S) if text.isdecimal() and len(text) < 20 else 0
