"""The command `gridsieve index`: makes vectors of the moments of a folder's films, and shows how fast."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bars

from gridsieve.cli.options import (
    AccessFlags,
    EmbedderOption,
    FolderArgument,
    FrameFlags,
    JsonOption,
    PruningFlags,
    StoreOption,
    in_flags,
    of_media,
    print_json,
    rename,
)
from gridsieve.cli.terminal import reported_errors, stderr, warn
from gridsieve.client.client import DEFAULT_ADDRESS, GridsieveClient
from gridsieve.client.prompt import user_turn
from gridsieve.moments import FolderIndex, Progress


def index(
    *,
    folder: FolderArgument,
    window_s: Annotated[
        float | None,
        of_media("--window", help="Divide films into moments of about so many seconds. Default: their shots."),
    ] = None,
    pruning: PruningFlags,
    frames: FrameFlags,
    store: StoreOption = None,
    embedder: EmbedderOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
    access: AccessFlags,
) -> None:
    """Make vectors of the moments of a folder's films, for `gridsieve search` and `gridsieve ask`.

    Only films that are new or have changed are read. After Ctrl-C or an error, the next call goes on where this one
    ended. Without --store, the vectors are in the file .gridsieve/index.sqlite of the folder.

    A film that cannot be read, or is too large to send, is named and left out; the exit status is then 1.

    Example: gridsieve index films --mode keyframes

    Example: gridsieve index recordings --window 10 --fps 1 --pruning-rate 0.75
    """
    films = user_turn(str(folder), "")

    async def update() -> Progress:
        async with (
            GridsieveClient(embedder, **access.access()) as client,
            FolderIndex(folder, client, store=store, on_server=frames.on_server) as found,
        ):
            with in_flags([films]), _Bar() as bar:
                return await found.update(
                    window_s=window_s,
                    frames=frames.options(),
                    options=pruning.options(),
                    report=bar.advanced,
                )

    with reported_errors(embedder, as_json=as_json):
        done = asyncio.run(update())
    for each in done.skipped:
        rename(each.error, [user_turn(each.path, "")])
    if as_json:
        print_json(_told(done))
    else:
        for each in done.skipped:
            warn(f"{each.path} is left out: {each.error}")
        typer.echo(f"{done.films} films, {done.moments} moments: {_speed(done)}")
    if done.skipped:
        raise typer.Exit(1)


class _Bar(Bars):
    """How much of the new and changed films is done, and how fast, if stderr is a terminal that can show it."""

    def __init__(self) -> None:
        columns = (TextColumn("indexing"), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
        super().__init__(*columns, console=stderr, transient=True, disable=not stderr.is_interactive)
        self._task = self.add_task("", total=1.0)

    def advanced(self, done: Progress) -> None:
        self.update(self._task, completed=done.share, description=_speed(done))


def _speed(done: Progress) -> str:
    return f"{done.video_s:.0f} s of video in {done.elapsed_s:.1f} s, {done.speed:.1f} × real time"


def _told(done: Progress) -> dict[str, object]:
    skipped = [{"file": each.path, "reason": each.error.reason, "message": str(each.error)} for each in done.skipped]
    return {
        "films": done.films,
        "moments": done.moments,
        "video_s": done.video_s,
        "elapsed_s": done.elapsed_s,
        "skipped": skipped,
    }
