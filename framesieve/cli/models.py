"""The command `framesieve models`, which prints the model families and what each can do."""

from __future__ import annotations

from dataclasses import asdict

import typer

from framesieve.cli.options import JsonOption, print_json
from framesieve.common.model_families import MODEL_FAMILIES, ModelFamily


def models(as_json: JsonOption = False) -> None:
    """Print the model families that `framesieve serve --model` takes, and what each can do.

    A checkpoint's config.json names its model_type.

    Example: framesieve models --json
    """
    if as_json:
        families = [asdict(each) | {"media": [kind.value for kind in each.media]} for each in MODEL_FAMILIES]
        print_json({"families": families})
        return
    width = 2 + max(len(family.model_type) for family in MODEL_FAMILIES)
    for family in MODEL_FAMILIES:
        typer.echo(f"{family.model_type:{width}}{family.models}\n{'':{width}}{_abilities(family)}")


def _abilities(family: ModelFamily) -> str:
    media = " and ".join(f"{kind.value}s" for kind in family.media)
    pruning = f"pruned by {', '.join(family.methods)}" if family.methods else ""
    return "; ".join(filter(None, (media, pruning, f"positions {family.positions}", family.limits)))
