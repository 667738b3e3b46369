"""A cache that keeps what was used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LastUsed(Generic[K, V]):
    """At most `max_size` together, by `size_of` each. Thread-safe. on_get: told whether a wanted value was there."""

    def __init__(
        self,
        max_size: int,
        size_of: Callable[[V], int] = lambda _: 1,
        on_get: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._max_size = max_size
        self._size_of = size_of
        self._on_get = on_get
        self._size = 0
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            found = self._values.get(key)
            if found is not None:
                self._values.move_to_end(key)
        self._on_get(found is not None)
        return found

    def put(self, key: K, value: V) -> None:
        """Keeps the value, unless it is larger than everything may be together."""
        with self._lock:
            if key in self._values:
                self._size -= self._size_of(self._values.pop(key))
            self._values[key] = value
            self._size += self._size_of(value)
            while self._size > self._max_size:
                self._size -= self._size_of(self._values.popitem(last=False)[1])
