"""The `gridsieve` command: serve, models, settings, ask, chat, live, watch, inspect, bench.

Completions and JSON are printed to stdout, everything else to stderr. Exit status: 0; 1 for an error, reported as one
line that begins with its reason; 2 for wrong usage; 130 after Ctrl-C. `serve` and `watch` have statuses of their own.
"""

from __future__ import annotations

import io
import sys
from importlib.metadata import version
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as error:
    raise SystemExit(f"the command needs {error.name}: pip install 'gridsieve[client]'") from error

from gridsieve.bench.command import bench
from gridsieve.cli.ask import ask
from gridsieve.cli.chat import chat
from gridsieve.cli.groups import spread
from gridsieve.cli.inspection import inspect
from gridsieve.cli.live import live
from gridsieve.cli.models import models
from gridsieve.cli.serve import serve
from gridsieve.cli.settings import settings
from gridsieve.cli.signals import raise_on_interrupt
from gridsieve.cli.variables import Command
from gridsieve.cli.watch import watch

app = typer.Typer(
    name="gridsieve",
    help="Answer questions about video, without spending tokens on patches that do not change.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gridsieve {version('gridsieve')}")
        raise typer.Exit


@app.callback()
def _prepare(
    _: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    raise_on_interrupt()
    # File names need not be valid Unicode. stderr escapes such characters by default, stdout raises.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


_FLAGS_OF_SERVICES = {"allow_extra_args": True, "ignore_unknown_options": True}
for _command in (serve, models, settings, ask, chat, live, watch, inspect, bench):
    app.command(cls=Command, context_settings=_FLAGS_OF_SERVICES if _command in (serve, settings) else None)(
        spread(_command)
    )

if __name__ == "__main__":
    app()
