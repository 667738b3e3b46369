"""Flags of the services for `gridsieve serve`, from its own command line and from a TOML file.

    --generation-dtype bfloat16          [generation]
                                         dtype = "bfloat16"

The services check names and values themselves. Flags of the command line come last, so they take precedence.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gridsieve.cli.launcher import GATEWAY, SERVICES
from gridsieve.common.contract.errors import StartupError

TABLES = (*SERVICES, GATEWAY)
# What `serve` itself gives to all services.
_OWN = {"listen", "metrics_port", "drain_s", "model", "media_root"} | set(SERVICES)


def service_flags(config: Path | None, extra: Sequence[str]) -> dict[str, list[str]]:
    """Flags by service. extra: arguments of `serve` that it does not know itself.

    Raises StartupError for a file that cannot be used, and for a flag that names no service.
    """
    found = {service: list(_flags_of(config, service)) if config else [] for service in TABLES}
    service = ""
    for argument in extra:
        if argument.startswith("--"):
            service, _, flag = argument.removeprefix("--").partition("-")
            if service not in TABLES or not flag:
                example = "--generation-dtype; `gridsieve settings` lists them"
                raise StartupError(
                    f"{argument} is unknown; a flag of a service begins with its name, such as {example}"
                )
            argument = f"--{flag}"
        elif not service:
            raise StartupError(f"unexpected argument {argument}")
        found[service].append(argument)
    return found


def _flags_of(config: Path, service: str) -> Iterator[str]:
    tables = _read(config)
    for name, value in tables.get(service, {}).items():
        key = name.replace("-", "_")
        if key in _OWN:
            raise StartupError(f"{config}: {service}.{name} is set by `gridsieve serve` for all services: use its flag")
        flag = key.replace("_", "-")
        match value:
            case bool():
                yield f"--{flag}" if value else f"--no-{flag}"
            case str() | int() | float():
                yield f"--{flag}={value}"
            case list():
                yield f"--{flag}={','.join(map(str, value))}"
            case _:
                raise StartupError(f"{config}: {service}.{name} must be a string, a number, true, false or a list")


def _read(config: Path) -> Mapping[str, Mapping[str, Any]]:
    try:
        tables = tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"--config {config}: {error.strerror}") from error
    except ValueError as error:
        raise StartupError(f"--config {config} is not TOML: {error}") from error
    for name, table in tables.items():
        if name not in TABLES or not isinstance(table, dict):
            raise StartupError(f"--config {config}: expected the tables {', '.join(TABLES)}, got {name!r}")
    return tables
