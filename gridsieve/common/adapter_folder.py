"""An adapter as `--adapters` names it: a name for requests, and a folder in PEFT's format."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gridsieve.common.contract.errors import StartupError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter's name and folder. Raises ValueError for an invalid name."""

    name: str
    path: Path

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"{self.name!r} is not an adapter name, which must be a letter or digit and at most 63 more letters, "
                f"digits, '.', '_' or '-'"
            )

    @classmethod
    def parse(cls, text: object) -> Self:
        """Parses NAME=DIR. Raises ValueError for anything else."""
        name, equals, path = str(text).partition("=")
        if not (equals and path):
            raise ValueError("an adapter must be NAME=DIR")
        return cls(name, Path(path))

    def __str__(self) -> str:
        return f"{self.name}={self.path}"

    def refusal(self, why: str) -> StartupError:
        """The error for an adapter that cannot be loaded."""
        return StartupError(f"--adapters {self}: {why}")
