"""The command `gridsieve models`, which prints the model families and what each can do. docs/models.md says more."""

from __future__ import annotations

from typing import Any

import typer

from gridsieve.cli.options import JsonOption, print_json
from gridsieve.cli.terminal import reported_errors
from gridsieve.common.contract.plan import Modality
from gridsieve.common.contract.retention import AFTER_TOWER, BEFORE_TOWER
from gridsieve.common.process import ExitStatus
from gridsieve.families import ModelFamily, families


def models(as_json: JsonOption = False) -> None:
    """Print the model families that `gridsieve serve --model` takes, and what each can do.

    A checkpoint's config.json names its model_type.

    Example: gridsieve models --json
    """
    with reported_errors(cannot_start=ExitStatus.CANNOT_START, as_json=as_json):
        rows = families().values()
    if as_json:
        print_json({"families": [_family_json(each) for each in rows]})
        return
    width = 2 + max(len(row.model_type) for row in rows)
    for row in rows:
        typer.echo(f"{row.model_type:{width}}{row.models}\n{'':{width}}{_abilities(row)}")


def _family_json(row: ModelFamily) -> dict[str, Any]:
    return {
        "model_type": row.model_type,
        "models": row.models,
        "media": [kind.value for kind in row.media],
        "pruning_methods": row.video_methods,
        "before_tower": [each for each in row.video_methods if each in BEFORE_TOWER],
        "positions": row.positions,
        "limits": row.limits,
        "live": row.live,
        "divisible": row.divisible,
    }


def _abilities(row: ModelFamily) -> str:
    *media, last = (kind.plural for kind in row.media)
    taken = f"{', '.join(media)} and {last}" if media else last
    pruning = [
        f"pruned {where} the tower by {', '.join(methods)}"
        for where, acting in (("after", AFTER_TOWER), ("before", BEFORE_TOWER))
        if (methods := [each for each in row.video_methods if each in acting])
    ]
    if Modality.VIDEO in row.media and not pruning:
        pruning = ["not pruned"]
    return "; ".join(filter(None, (taken, *pruning, f"positions {row.positions}", row.limits)))
