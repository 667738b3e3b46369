"""Groups of flags: a command may have a parameter whose type is a dataclass, each field of which is a flag."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it, without groups. Names of fields and of other parameters must differ."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    flat: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if group := groups.get(name):
            of_group = get_type_hints(group, include_extras=True)
            flat += [
                Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=of_group[each.name])
                for each in fields(group)
            ]
        else:
            flat.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: group(**{each.name: given.pop(each.name) for each in fields(group)}) for name, group in groups.items()
        }
        command(**made, **given)

    run.__signature__ = Signature(flat)  # type: ignore[attr-defined]  # `inspect` reads it
    run.__annotations__ = {each.name: each.annotation for each in flat}
    return run
