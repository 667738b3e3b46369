"""Prints the table of docs/models.md: `python -m gridsieve.families`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from gridsieve.common.contract.retention import METHODS, NONE
from gridsieve.families import FAMILIES, ModelFamily

_COLUMNS = ("`model_type`", "models", "media", "pruning of videos", "positions", "live", "tower divided", "limits")


def table() -> str:
    """A line for each model type of this package."""
    lines = [_COLUMNS, ["---"] * len(_COLUMNS), *map(tuple, map(_cells, FAMILIES))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cells(row: ModelFamily) -> Iterator[str]:
    yield f"`{row.model_type}`"
    yield f"[{row.models}](../{row.folder.replace('.', '/')}/README.md)"
    yield ", ".join(kind.plural for kind in row.media)
    yield _pruning(row)
    yield row.positions
    yield "yes" if row.live else "–"
    yield "yes" if row.divisible else "–"
    yield row.limits or "–"


def _pruning(row: ModelFamily) -> str:
    missing = [f"`{each}`" for each in METHODS if each not in (*row.video_methods, NONE)]
    if not missing:
        return "all"
    return f"all but {' and '.join(missing)}" if row.video_methods else "–"


if __name__ == "__main__":
    sys.stdout.write(table())
