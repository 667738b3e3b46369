"""The command `gridsieve settings`, which prints every setting of the services."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import typer

from gridsieve.cli.launcher import environment
from gridsieve.cli.options import JsonOption, print_json
from gridsieve.cli.serve import ConfigOption
from gridsieve.cli.stack_flags import TABLES, service_flags
from gridsieve.cli.terminal import reported_errors
from gridsieve.common.process import ExitStatus

Settings: TypeAlias = dict[str, list[dict[str, Any]]]


def settings(
    context: typer.Context,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print every setting of the services, with its value.

    Each line also says where the value comes from (default, environment, file, flag), and the default if it differs.

    Accepts the same flags of services as `gridsieve serve`.

    Example: gridsieve settings --config deploy/stack.toml --generation-dtype bfloat16
    """
    with reported_errors(cannot_start=ExitStatus.CANNOT_START, as_json=as_json):
        found = _of_services({"file": service_flags(config, ()), "flag": service_flags(None, context.args)})
    if as_json:
        print_json(found)
        return
    for name, rows in found.items():
        typer.echo(f"{name}: GRIDSIEVE_…")
        for row in rows:
            default = "" if row["source"] == "default" else f"   default: {_shown(row['default'])}"
            typer.echo(f"  {row['flag']:28} {_shown(row['value']):28} {row['source']}{default}")


def _of_services(given: Mapping[str, Mapping[str, list[str]]]) -> Settings:
    """Each setting's flag, variable, value, where the value comes from, and default, by service.

    The services tell them in a process of their own: the client must not import the services.
    given: flags of services by their source, the stronger one last. Ends the command if a service would refuse them.
    """
    flags = [f"--{service}={json.dumps({each: given[each][service] for each in given})}" for service in TABLES]
    command = [sys.executable, "-P", "-m", "gridsieve.services.settings", "--json", *flags]
    ended = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, check=False)  # noqa: S603  (not a shell)
    if ended.returncode:
        raise typer.Exit(ended.returncode)
    found: Settings = json.loads(ended.stdout)
    return found


def _shown(value: Any) -> str:
    if isinstance(value, list):
        value = ",".join(map(str, value))
    return "unset" if value in (None, "") else str(value)
