"""The command `gridsieve search`: finds the moments of a folder's films that a text describes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from gridsieve.cli.moments import described, moment_json
from gridsieve.cli.moments_page import moments_page
from gridsieve.cli.moments_sheet import moments_sheet
from gridsieve.cli.options import (
    AccessFlags,
    EmbedderOption,
    FolderArgument,
    JsonOption,
    StoreOption,
    of_output,
    print_json,
)
from gridsieve.cli.terminal import reported_errors
from gridsieve.client.client import DEFAULT_ADDRESS, GridsieveClient
from gridsieve.search.films import FilmMoment
from gridsieve.search.folder_search import FolderSearch

_PAGE = ".html"
_SUFFIXES = (".png", ".jpg", ".jpeg", _PAGE)


def search(
    *,
    folder: FolderArgument,
    text: Annotated[str, typer.Argument(help="What is to be seen.")],
    limit: Annotated[int, of_output("--limit", "-n", min=1, help="How many moments to print, the best first.")] = 5,
    sheet: Annotated[
        Path | None,
        of_output(
            help="Draw a frame of each moment into this PNG or JPEG file, or write a page (.html) on "
            "which a click plays the moment."
        ),
    ] = None,
    store: StoreOption = None,
    embedder: EmbedderOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
    access: AccessFlags,
) -> None:
    """Find the moments of a folder's films that a text describes: file, seconds and score.

    `gridsieve index FOLDER` comes first. The score is the cosine of the moment's vector and the text's.

    Example: gridsieve search films "a red car stops" --sheet found.png
    """
    if sheet is not None and sheet.suffix.lower() not in _SUFFIXES:
        raise typer.BadParameter(f"--sheet must end with {', '.join(_SUFFIXES)}, got {sheet}")

    async def found() -> tuple[list[FilmMoment], list[bytes]]:
        async with (
            GridsieveClient(embedder, **access.access()) as client,
            FolderSearch(folder, client, store=store) as index,
        ):
            moments = await index.search(text, limit)
            return moments, await index.pictures(moments) if sheet else []

    with reported_errors(embedder, as_json=as_json):
        moments, pictures = asyncio.run(found())
        if sheet is not None:
            if sheet.suffix.lower() == _PAGE:
                sheet.write_text(moments_page(pictures, moments, text, folder, sheet.parent), encoding="utf-8")
            else:
                moments_sheet(pictures, moments, text).save(sheet)
    if as_json:
        print_json({"moments": [moment_json(each) for each in moments]})
    else:
        for each in moments:
            typer.echo(described(each))
