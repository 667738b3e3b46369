"""Prints every setting of the services.

As Markdown: `python -m gridsieve.services.settings > docs/settings.md`. With values, for `gridsieve settings`: --json
prints one object; --generation='{"file": ["--dtype", "bfloat16"], "flag": []}' gives flags of a service by
where they come from.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from gridsieve.common.contract.errors import StartupError
from gridsieve.common.process import ExitStatus
from gridsieve.common.serving.settings import (
    CallerSettings,
    ListenerSettings,
    ServiceSettings,
    UpstreamSettings,
    flag_of,
    variable_of,
)
from gridsieve.services.encoder.settings import EncoderSettings
from gridsieve.services.gateway.settings import GatewaySettings
from gridsieve.services.generation.settings import GenerationSettings
from gridsieve.services.preprocessing.settings import PreprocessingSettings

_ROOT = Path(__file__).parents[2]
_INTRODUCTION = """# Settings

Every setting of a service is a flag and an environment variable; the flag takes precedence. `gridsieve serve` passes
its environment on to the services, except GRIDSIEVE_DRAIN_S. This page is the output of
`python -m gridsieve.services.settings`."""
_SERVICES: Mapping[str, type[ListenerSettings]] = {
    "Preprocessing": PreprocessingSettings,
    "Encoder": EncoderSettings,
    "Generation": GenerationSettings,
    "Gateway": GatewaySettings,
}


def page() -> str:
    """The settings that all share, those of gRPC services, those of what calls services, then each service's own."""
    # A service defines its address and port anew: its defaults are its own.
    own_defaults = {"listen", "metrics_port"}
    shown: set[str] = set(own_defaults)
    parts = [_INTRODUCTION]
    for title, fields in (
        ("All services and the gateway", ListenerSettings.model_fields),
        ("All services", ServiceSettings.model_fields),
        ("Encoder, generation and gateway", CallerSettings.model_fields),
        ("Encoder and generation", UpstreamSettings.model_fields),
    ):
        parts += _table(title, {name: field for name, field in fields.items() if name not in shown})
        shown |= fields.keys()
    for title, settings in _SERVICES.items():
        inherited = {name for base in settings.__mro__[1:] for name in getattr(base, "model_fields", ())} - own_defaults
        own = {name: field for name, field in settings.model_fields.items() if name not in inherited}
        parts += _table(f"{title}: `python -m gridsieve.services.{title.lower()}`", own)
    return "\n".join(parts) + "\n"


def _table(title: str, fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    yield f"\n## {title}\n"
    yield "| flag | variable | default | description |"
    yield "|---|---|---|---|"
    for name, field in fields.items():
        description = (field.description or "").replace("|", "\\|")
        yield f"| `{flag_of(name)}` | `{variable_of(name)}` | {_default(field)} | {description} |"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "see description"
    default: Any = field.default
    match default:
        case None | () | "":
            return "unset"
        case Path():
            return f"`{default.relative_to(_ROOT) if default.is_relative_to(_ROOT) else default}`"
        case bool():
            return "on" if default else "off"
        case int() if default >= 2**20 and default & (default - 1) == 0:
            return f"`{default}` (2^{default.bit_length() - 1})"
        case tuple():
            return f"`{','.join(map(str, default))}`"
    return f"`{default}`"


def values(settings: type[ListenerSettings], flags: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Any]]:
    """Each setting of a service, its value, default, and source: default, environment, or the last one in `flags`.

    Raises StartupError for a value that the service would refuse.
    """
    loaded = settings.load([each for given in flags.values() for each in given])
    variables = {name.upper() for name in os.environ}
    for name, field in settings.model_fields.items():
        source = "environment" if variable_of(name) in variables else "default"
        for place, given in flags.items():
            of_place = {flag.partition("=")[0].removeprefix("--no-").removeprefix("--") for flag in given}
            if flag_of(name).removeprefix("--") in of_place:
                source = place
        yield {
            "flag": flag_of(name),
            "variable": variable_of(name),
            "value": _plain(getattr(loaded, name)),
            "source": source,
            "default": None if field.default_factory is not None else _plain(field.default),
        }


def _plain(value: Any) -> Any:
    """The value as JSON has it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return [_plain(each) for each in value] if isinstance(value, tuple | list | frozenset) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    for title in _SERVICES:
        parser.add_argument(f"--{title.lower()}", type=json.loads, default={})
    arguments = parser.parse_args()
    if not arguments.json:
        sys.stdout.write(page())
        return
    try:
        found = {
            title.lower(): list(values(settings, getattr(arguments, title.lower())))
            for title, settings in _SERVICES.items()
        }
    except StartupError as error:
        print(f"STARTUP: {error}", file=sys.stderr)
        sys.exit(ExitStatus.CANNOT_START)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
