"""The settings of the services, as a process of their own tells them: the client must not import the services."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import typer

from gridsieve.cli.launcher import GATEWAY, SERVICES, environment

TABLES = (*SERVICES, GATEWAY)

Settings: TypeAlias = dict[str, list[dict[str, Any]]]


def settings_of_services(given: Mapping[str, Mapping[str, list[str]]]) -> Settings:
    """Every setting of each service: its flag, variable, value, where the value comes from, and default.

    given: flags of services by their source, the stronger one last. Ends the command if a service would refuse them.
    """
    flags = [f"--{service}={json.dumps({each: given[each][service] for each in given})}" for service in TABLES]
    command = [sys.executable, "-P", "-m", "gridsieve.services.settings", "--json", *flags]
    ended = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, check=False)  # noqa: S603  (not a shell)
    if ended.returncode:
        raise typer.Exit(ended.returncode)
    found: Settings = json.loads(ended.stdout)
    return found
