"""Environment variables of the command's flags: GRIDSIEVE_ASK_MAX_NEW_TOKENS for `gridsieve ask --max-new-tokens`.

The names begin with that of the command, so that none is also the name of a service's setting: services inherit the
environment of `gridsieve serve`. The few names without a command, such as GRIDSIEVE_SERVER, come second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

_SOURCES = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT": "default"}


class Command(TyperCommand):
    """A command whose flags all have an environment variable. A flag that may be repeated takes one value a line."""

    def __init__(self, name: str, **about: Any) -> None:
        super().__init__(name, **about)
        shared: list[str] = []
        for option in _options(self):
            given = option.envvar or []
            general = [given] if isinstance(given, str) else list(given)
            shared += general
            own = f"GRIDSIEVE_{name}_{_flag(option)[2:]}".upper().replace("-", "_")
            option.envvar = list(dict.fromkeys([own, *general]))
            option.show_envvar = False  # the epilog says it for all flags at once
            if option.type_descriptor.annotation == list[str]:  # otherwise split at spaces, which texts contain
                option.split_envvar_value = str.splitlines  # type: ignore[assignment, method-assign]
        example = _options(self)[0]
        self.epilog = f"Every flag is also an environment variable: {_variables(example)[0]} for {_flag(example)}."
        if shared:
            self.epilog += f" Shared by several commands: {', '.join(shared)}."

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if isinstance(error.param, TyperOption) and source(ctx, error.param.name) == "environment":
                error.param_hint = _variable_in_use(error.param)
            raise


def source(context: typer.Context, name: str) -> str:
    """Where the value of a parameter comes from: flag, environment or default."""
    found = context.get_parameter_source(name)
    return _SOURCES[found.name] if found else "default"


def values(context: typer.Context, command: Command, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Each flag of another command, its variable, value, source and default.

    given: values by the names of parameters, as from that command's line. Raises BadParameter for a wrong value.
    """
    other = type(context)(command, info_name=command.name, parent=context.parent)
    for option in _options(command):
        value, where = option.consume_value(other, given)
        if _SOURCES[where.name] == "environment":
            try:
                value = option.process_value(other, value)
            except typer.BadParameter as error:
                error.param_hint = _variable_in_use(option)
                raise
        yield {
            "flag": _flag(option),
            "variable": _variables(option)[0],
            "value": _plain(value),
            "source": _SOURCES[where.name],
            "default": _plain(option.get_default(other)),
        }


def _options(command: TyperCommand) -> list[TyperOption]:
    return [each for each in command.params if isinstance(each, TyperOption)]


def _flag(option: TyperOption) -> str:
    """The flag in its long form."""
    return max(option.opts, key=len)


def _variables(option: TyperOption) -> list[str]:
    assert isinstance(option.envvar, list)
    return option.envvar


def _variable_in_use(option: TyperOption) -> str:
    return next(name for name in _variables(option) if os.environ.get(name))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
