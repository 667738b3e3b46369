"""Gridsieve: video question answering with exact token pruning, over gRPC.

    from gridsieve import GridsieveClient, Video, Pruning

    async with GridsieveClient("127.0.0.1:50053") as client:
        print(await client.ask("clip.mp4", "What moves?", pruning_rate=0.75))

The names of `gridsieve.client` are loaded on first use (PEP 562): the services import the generated messages in
`gridsieve.v1`, which runs this file, and must not load the client.
"""

from __future__ import annotations

from importlib import import_module
from inspect import ismodule
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gridsieve.client import *  # noqa: F403  (for type checkers)


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and name in _exported():
        return getattr(import_module("gridsieve.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_exported()]


def _exported() -> list[str]:
    """The names of `gridsieve.client`, without those of its modules."""
    names = vars(import_module("gridsieve.client")).items()
    return [name for name, value in names if not name.startswith("_") and not ismodule(value)]
