"""Stored positions of MiniCPM-V: a square of cells, laid over every picture. A patch takes that in which it begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from gridsieve.services.encoder.tower.packing import Array


@dataclass(frozen=True, slots=True)
class Cells:
    """A square table of `side` cells a side.

    in_a_row: whether a picture's patches are one row, in the first row of cells. by_quotient: whether the place where a
    patch begins is a quotient, and not an element of a range with the patch as its step.
    """

    side: int
    in_a_row: bool = False
    by_quotient: bool = False

    def by_row(self, positions: Array, rows: int, columns: int) -> Mapping[str, Array]:
        """See `Table`. cells: int64 (P,), the cell of each patch."""
        lengths = (rows, columns)
        if self.in_a_row:
            lengths = (1, len(positions))
            positions = np.indices(lengths).reshape(2, -1).T
        row, column = (self._begun(length)[positions[:, axis]] for axis, length in enumerate(lengths))
        return {"cells": row * self.side + column}

    def _begun(self, length: int) -> Array:
        """The cell of an axis that each of its places begins in: int64 (length,).

        By the published operations: where a place begins at a border, the cell depends on how they round. The length is
        a tensor there, so the step is a float32.
        """
        if self.by_quotient:
            begins = torch.arange(length) / length
        else:
            begins = torch.arange(0, 1 - 1e-6, (1 / torch.tensor(length)).item(), dtype=torch.float32)
        borders = torch.arange(1 / self.side, 1.0, 1 / self.side, dtype=torch.float32)
        found: Array = torch.bucketize(begins, borders, right=True).numpy()
        return found
