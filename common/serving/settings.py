"""Settings that every service has, read from flags and from FRAMESIEVE_… environment variables, flags first."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import AliasChoices, Field, PrivateAttr, ValidationError, model_validator
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

from common.checkpoint import DEMO_MODEL
from common.contract.errors import StartupError


def renamed(old_name: str, new_name: str) -> AliasChoices:
    """The aliases of a field that was called `old_name`: flag and variable of either name set it.

    max_model_len: int = Field(..., validation_alias=renamed("max_prompt_tokens", "max_model_len"))

    new_name: the field's own name. Where both names are set, the new one counts; a flag counts before a variable.
    `serve` logs a warning for each old name in use. Drop the alias one release after the renaming.
    """
    return AliasChoices(new_name, old_name)


class ServiceSettings(BaseSettings):
    """A service's settings. Subclasses add fields (and `cli_prog_name`); every field is a flag and a variable."""

    model_config = SettingsConfigDict(
        env_prefix="FRAMESIEVE_",
        env_prefix_target="all",  # aliases as well, see `renamed`
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
    drain_s: float = Field(
        30.0,
        ge=0,
        description="seconds that running requests get to finish after SIGTERM or SIGINT; a second signal ends the "
        "service at once. Exit status: 0 all finished, 3 some were cut off, 2 cannot start, 128 + signal at once",
    )
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="auto is console on a terminal, else json"
    )
    log_level: Literal["debug", "info", "warning"] = Field(
        "info", description="the least of what is logged; at info, a line for each request when it has ended"
    )
    reflection: bool = Field(True, description="whether callers may ask which methods and messages there are")

    tls_cert: Path | None = Field(
        None,
        description="certificate, with those that lead to its authority, in PEM: --listen speaks TLS with it (not on a "
        "unix socket), and upstream services that ask are shown it",
    )
    tls_key: Path | None = Field(None, description="its private key, in PEM, without a password")
    tls_client_ca: Path | None = Field(
        None, description="authorities in PEM: callers must show a certificate of theirs (mutual TLS)"
    )
    metrics_tls: bool = Field(False, description="whether /metrics is guarded by the same TLS as --listen")
    auth_tokens_file: Path | None = Field(
        None, description="a name and a bearer token each line: callers must show one of these tokens"
    )
    max_requests_per_client: int | None = Field(
        None,
        ge=1,
        description="most requests that one client has running, known by its token, else its certificate, else its "
        "address; unset: as many as come",
    )
    max_bytes_per_client: int | None = Field(
        None, ge=1, description="most bytes, inline media above all, of one client's running requests; unset: any"
    )

    _old_names: tuple[tuple[str, str], ...] = PrivateAttr(())

    @property
    def old_names(self) -> tuple[tuple[str, str], ...]:
        """(old, new) for each flag and variable in use that was renamed."""
        return self._old_names

    @model_validator(mode="after")
    def _whole_tls(self) -> Self:
        cert, key = ("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key)
        client_ca, metrics = ("--tls-client-ca", self.tls_client_ca), ("--metrics-tls", self.metrics_tls)
        for (flag, value), (missing, needed) in ((cert, key), (key, cert), (client_ca, cert), (metrics, cert)):
            if value and needed is None:
                raise StartupError(f"{flag} {value} needs {missing}, which is not set")
        return self

    @classmethod
    def load(cls, arguments: Sequence[str] | None = None) -> Self:
        """Settings from `arguments` (default: the command line) and the environment.

        Raises StartupError naming every field that is wrong; exits as argparse does on --help and unknown flags.
        """
        arguments = list(sys.argv[1:] if arguments is None else arguments)
        try:
            settings = CliApp.run(cls, cli_args=arguments)
        except ValidationError as error:
            wrong = "; ".join(
                f"--{_flag(each['loc'])}: {each['msg']}, got {each['input']!r}" for each in error.errors()
            )
            raise StartupError(wrong) from error
        settings._old_names = tuple(_old_names_in_use(cls, arguments))
        return settings


class UpstreamSettings(ServiceSettings):
    """Settings of a service that calls others: how it calls all of them."""

    upstream_tls_ca: Path | None = Field(
        None,
        description="authorities in PEM: upstream services are called by TLS, and must show a certificate of theirs",
    )
    upstream_token_file: Path | None = Field(None, description="file with the bearer token that is shown upstream")
    allow_plaintext_token: bool = Field(
        False, description="let the token go to other machines without TLS, on a network that something else guards"
    )


def _old_names_in_use(settings: type[BaseSettings], arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    flags = {argument.partition("=")[0] for argument in arguments}
    variables = {name.upper() for name in os.environ}
    for new, field in settings.model_fields.items():
        if isinstance(field.validation_alias, AliasChoices):
            for old in (str(each) for each in field.validation_alias.choices if each != new):
                if (flag := f"--{_flag([old])}") in flags:
                    yield flag, f"--{_flag([new])}"
                if (variable := variable_of(old)) in variables:
                    yield variable, variable_of(new)


def variable_of(name: str) -> str:
    """The environment variable of a field."""
    return f"FRAMESIEVE_{name.upper()}"


def _flag(location: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in location).replace("_", "-")
