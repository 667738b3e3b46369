"""Environment variables of the command's flags: GRIDSIEVE_ASK_MAX_NEW_TOKENS for `gridsieve ask --max-new-tokens`.

The names begin with that of the command, so that none is also the name of a service's setting: services inherit the
environment of `gridsieve serve`. The few names without a command, such as GRIDSIEVE_SERVER, come second.
"""

from __future__ import annotations

import os
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

_SOURCES = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT": "default"}


class Command(TyperCommand):
    """A command whose flags all have an environment variable. A flag that may be repeated takes one value a line."""

    def __init__(self, name: str, **about: Any) -> None:
        super().__init__(name, **about)
        shared: list[str] = []
        examples = []
        for option in (each for each in self.params if isinstance(each, TyperOption)):
            given = option.envvar or []
            general = [given] if isinstance(given, str) else list(given)
            shared += general
            flag = max(option.opts, key=len)
            own = f"GRIDSIEVE_{name}_{flag[2:]}".upper().replace("-", "_")
            examples.append(f"{own} for {flag}")
            option.envvar = list(dict.fromkeys([own, *general]))
            option.show_envvar = False  # the epilog says it for all flags at once
            if option.type_descriptor.annotation == list[str]:  # otherwise split at spaces, which texts contain
                option.split_envvar_value = str.splitlines  # type: ignore[assignment, method-assign]  # other options keep the method
        self.epilog = f"Every flag is also an environment variable: {examples[0]}."
        if shared:
            self.epilog += f" Shared by several commands: {', '.join(shared)}."

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # click names its own Context
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            option = error.param
            if isinstance(option, TyperOption) and source(ctx, option.name) == "environment":
                error.param_hint = next(name for name in option.envvar or () if os.environ.get(name))
            raise


def source(context: typer.Context, name: str) -> str:
    """Where the value of a parameter comes from: flag, environment or default."""
    found = context.get_parameter_source(name)
    return _SOURCES[found.name] if found else "default"
