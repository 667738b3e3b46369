"""The blocks of one sequence, in the order of its tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from gridsieve.common.contract.plan import Int32Array


class BlockTable(list[int]):
    """The blocks of a sequence, in order, also as an array, which steps read.

    Changed by `+=`, by assigning to slices and by `del` alone: the array follows these.
    """

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        super().__init__(blocks)
        self._array = np.empty(0, np.int32)
        self._filled = 0  # entries of the array that are those of the list

    def __setitem__(self, key: Any, value: Any) -> None:
        self._filled = 0
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._filled = 0
        super().__delitem__(key)

    @property
    def array(self) -> Int32Array:
        """int32 [blocks]. Valid until a block is replaced or removed."""
        if self._filled != len(self):
            if len(self._array) < len(self):
                self._array, self._filled = np.empty(2 * len(self), np.int32), 0
            self._array[self._filled : len(self)] = self[self._filled :]
            self._filled = len(self)
        return self._array[: self._filled]
