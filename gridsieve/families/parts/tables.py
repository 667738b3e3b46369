"""A table of position embeddings of which each patch takes a weighted sum of a few entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gridsieve.services.encoder.tower.packing import Array


@dataclass(frozen=True, slots=True)
class InterpolatedTable:
    """A square table of `side` entries a side.

    axis: the entries that each place of an axis takes, int64 (P, E), and their weights, float32 (P, E), of the places,
        int64 (P,), the axis' length and the table's side. A patch takes those of its row times those of its column.
    over_square: whether the table is laid over the square of a frame's longer side, and not over the frame.
    """

    side: int
    axis: Callable[[Array, int, int], tuple[Array, Array]]
    over_square: bool = False

    def by_row(self, positions: Array, rows: int, columns: int) -> Mapping[str, Array]:
        """See `Table`. entries: int64 (P, E), whose weighted sum is a patch's position embedding, 4 or 16; weights:
        float32 (P, E)."""
        lengths = (max(rows, columns),) * 2 if self.over_square else (rows, columns)
        (row_entries, row_weights), (column_entries, column_weights) = (
            self.axis(positions[:, axis], length, self.side) for axis, length in enumerate(lengths)
        )
        entries = row_entries[:, :, None] * self.side + column_entries[:, None]
        weights = row_weights[:, :, None] * column_weights[:, None]
        return {"entries": entries.reshape(len(entries), -1), "weights": weights.reshape(len(entries), -1)}
