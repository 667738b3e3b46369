"""The command `gridsieve settings`, which prints every setting of the services."""

from __future__ import annotations

from typing import Any

import typer

from gridsieve.cli.options import JsonOption, print_json
from gridsieve.cli.serve import ConfigOption
from gridsieve.cli.service_settings import settings_of_services
from gridsieve.cli.stack_flags import service_flags
from gridsieve.cli.terminal import reported_errors
from gridsieve.common.process import ExitStatus


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
        found = settings_of_services({"file": service_flags(config, ()), "flag": service_flags(None, context.args)})
    if as_json:
        print_json(found)
        return
    for name, rows in found.items():
        typer.echo(f"{name}: GRIDSIEVE_…")
        for row in rows:
            default = "" if row["source"] == "default" else f"   default: {_shown(row['default'])}"
            typer.echo(f"  {row['flag']:28} {_shown(row['value']):28} {row['source']}{default}")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        value = ",".join(map(str, value))
    return "unset" if value in (None, "") else str(value)
