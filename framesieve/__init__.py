"""Framesieve: questions about video, answered over gRPC.

    from framesieve import FramesieveClient, Video, Pruning

The names of the client are loaded on first use: the services import `framesieve.v1`, the generated messages, and must
not load the client with them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framesieve.client import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    client = import_module("framesieve.client")
    if name not in client.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(client, name)


def __dir__() -> list[str]:
    return [*globals(), *import_module("framesieve.client").__all__]
