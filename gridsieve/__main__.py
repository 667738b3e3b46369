"""The `gridsieve` command: serve, models, settings, ask, chat, batch, index, search, live, watch, inspect, bench.

Completions and JSON are printed to stdout, everything else to stderr. Exit status: 0; 1 for an error, reported as one
line that begins with its reason; 2 for wrong usage; 130 after Ctrl-C. `serve` and `watch` have statuses of their own.
"""

from __future__ import annotations

import io
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

try:
    import typer
except ModuleNotFoundError as error:
    raise SystemExit(f"the command needs {error.name}: pip install 'gridsieve[client]'") from error
from typer.core import TyperGroup

from gridsieve.cli.groups import spread
from gridsieve.cli.signals import raise_on_interrupt
from gridsieve.cli.variables import Command

# Each command's module, in which a function has its name, and the first line of its help.
COMMANDS = {
    "serve": ("gridsieve.cli.serve", "Run the three services and their HTTP gateway on this machine until Ctrl-C."),
    "models": (
        "gridsieve.cli.models",
        "Print the model families that `gridsieve serve --model` takes, and what each can do.",
    ),
    "settings": ("gridsieve.cli.settings", "Print every setting of the services, with its value."),
    "ask": (
        "gridsieve.cli.ask",
        "Ask a question about videos, images and sounds; the completion is streamed to stdout.",
    ),
    "chat": (
        "gridsieve.cli.chat",
        "Talk about videos, images and sounds: the model sees the earlier questions and answers, too.",
    ),
    "batch": (
        "gridsieve.cli.batch",
        "Ask many questions, such as one about each clip of a folder; a run that was interrupted continues.",
    ),
    "index": (
        "gridsieve.cli.index",
        "Make vectors of the moments of a folder's films, for `gridsieve search` and `gridsieve ask`.",
    ),
    "search": (
        "gridsieve.cli.search",
        "Find the moments of a folder's films that a text describes: file, seconds and score.",
    ),
    "live": (
        "gridsieve.cli.live",
        "Ask about a video while it plays, again and again.",
    ),
    "watch": (
        "gridsieve.cli.watch",
        "Watch the cameras of a file: ask about each at intervals, or when something changed, until Ctrl-C.",
    ),
    "inspect": (
        "gridsieve.cli.inspection",
        "Draw which patches of a video pruning keeps: all frames, with pruned patches dimmed; one sheet per method.",
    ),
    "bench": ("gridsieve.bench.command", "Measure a server under load: latencies, throughput, and what pruning saves."),
}
_TAKE_FLAGS_OF_SERVICES = ("serve", "settings")
_MARKUP: Any = {"pretty_exceptions_enable": False, "rich_markup_mode": "markdown"}  # joins the lines of a paragraph


class _Commands(TyperGroup):
    """Imports a command's module when it is chosen. Until then the command is its line of help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, _imported(name) if name in COMMANDS else command, rest


def _imported(name: str) -> Any:
    module, _ = COMMANDS[name]
    extra = {"allow_extra_args": True, "ignore_unknown_options": True} if name in _TAKE_FLAGS_OF_SERVICES else None
    one = typer.Typer(add_completion=False, **_MARKUP)
    one.command(name, cls=Command, context_settings=extra)(spread(getattr(import_module(module), name)))
    return typer.main.get_command(one)


app = typer.Typer(
    name="gridsieve",
    help="Answer questions about video, without spending tokens on patches that do not change.",
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    **_MARKUP,
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


for _name, (_, _line) in COMMANDS.items():
    app.command(_name, help=_line)(lambda: None)

if __name__ == "__main__":
    app()
