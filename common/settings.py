"""Settings that every service has, read from flags and from FRAMESIEVE_… environment variables, flags first."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

from common.checkpoint import DEMO_MODEL
from common.errors import StartupError


class ServiceSettings(BaseSettings):
    """A service's settings. Subclasses add fields (and `cli_prog_name`); every field is a flag and a variable."""

    model_config = SettingsConfigDict(
        env_prefix="FRAMESIEVE_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        extra="forbid",
        frozen=True,
    )

    model: Path = Field(DEMO_MODEL, description="checkpoint folder in transformers' format")
    listen: str = Field(description="address to serve on, host:port or unix:/path")
    metrics_port: int = Field(ge=0, le=65535, description="port for Prometheus' /metrics; 0 serves none")
    drain_s: float = Field(30.0, ge=0, description="seconds that running requests get to finish after SIGTERM")
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="auto is console on a terminal, else json"
    )

    @classmethod
    def load(cls, arguments: Sequence[str] | None = None) -> Self:
        """Settings from `arguments` (default: the command line) and the environment.

        Raises StartupError naming every field that is wrong; exits as argparse does on --help and unknown flags.
        """
        try:
            return CliApp.run(cls, cli_args=list(sys.argv[1:] if arguments is None else arguments))
        except ValidationError as error:
            wrong = "; ".join(
                f"--{_flag(each['loc'])}: {each['msg']}, got {each['input']!r}" for each in error.errors()
            )
            raise StartupError(wrong) from error


def _flag(location: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in location).replace("_", "-")
