"""Settings that every service has, from flags and from GRIDSIEVE_… environment variables; flags take precedence.

`python -m gridsieve.services.settings` lists the settings of all services.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PlainSerializer, PlainValidator, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, CliApp, NoDecode, SettingsConfigDict

from gridsieve.common.adapter_folder import AdapterFolder
from gridsieve.common.address import check_address
from gridsieve.common.checkpoint import DEMO_MODEL
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.limits import GREATEST_INLINE_BYTES, MAX_INLINE_BYTES

_PREFIX = "GRIDSIEVE_"


class ListenerSettings(BaseSettings):
    """What everything that listens has. Subclasses add fields and `cli_prog_name`; each is a flag and a variable."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        extra="forbid",
        frozen=True,
    )

    listen: str = Field(description="address to serve on, host:port or unix:/path")
    drain_s: float = Field(
        30.0,
        ge=0,
        description="seconds that running requests get to finish after SIGTERM or SIGINT; a second signal ends the "
        "service at once. Exit status: 0 all finished, 3 some were cut off, 2 cannot start, 128 + n ended by signal n",
    )
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="auto: console on a terminal, json otherwise"
    )
    log_level: Literal["debug", "info", "warning"] = Field(
        "info", description="lowest level that is logged; info logs one line per finished request"
    )

    tls_cert: Path | None = Field(
        None,
        description="certificate chain in PEM: enables TLS on --listen (not on a unix socket), and is the client "
        "certificate for upstream services",
    )
    tls_key: Path | None = Field(None, description="private key of --tls-cert in PEM, without a password")
    tls_client_ca: Path | None = Field(
        None,
        description="certificate authorities in PEM: callers must have a certificate from one of them (mutual TLS)",
    )
    auth_tokens_file: Path | None = Field(
        None, description="file with a name and a bearer token per line: callers must send one of these tokens"
    )
    max_inline_bytes: int = Field(
        MAX_INLINE_BYTES,
        ge=0,
        le=GREATEST_INLINE_BYTES,
        description="maximum bytes of files and embeddings in one request; set the same in all three services",
    )
    max_requests: int | None = Field(
        None, ge=1, description="maximum requests that run or wait at a time; further ones are refused; unset: no limit"
    )
    max_requests_per_client: int | None = Field(
        None,
        ge=1,
        description="maximum running requests of one client; a client is identified by its token, else its "
        "certificate, else its address; unset: no limit",
    )
    max_bytes_per_client: int | None = Field(
        None,
        ge=1,
        description="maximum bytes of one client's running requests, mainly inline media; unset: no limit",
    )

    @model_validator(mode="after")
    def _check_listen(self) -> Self:
        check_address("--listen", self.listen)
        return self

    @model_validator(mode="after")
    def _complete_tls(self) -> Self:
        cert, key = ("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key)
        client_ca = ("--tls-client-ca", self.tls_client_ca)
        for (flag, value), (missing, needed) in ((cert, key), (key, cert), (client_ca, cert)):
            if value and needed is None:
                raise StartupError(f"{flag} {value} needs {missing}, which is not set")
        return self

    @classmethod
    def load(cls, arguments: Sequence[str] | None = None) -> Self:
        """Settings from `arguments` (default: the command line) and the environment.

        Raises StartupError naming each wrong field. Exits as argparse does for --help and unknown flags.
        """
        arguments = list(sys.argv[1:] if arguments is None else arguments)
        try:
            return CliApp.run(cls, cli_args=arguments)
        except ValidationError as error:
            wrong = "; ".join(
                f"{flag_of('.'.join(map(str, each['loc'])))}: {each['msg']}, got {each['input']!r}"
                for each in error.errors()
            )
            raise StartupError(wrong) from error


class ServiceSettings(ListenerSettings):
    """What every gRPC service has."""

    model: Path = Field(
        DEMO_MODEL,
        description="checkpoint folder in transformers' format, or a Hugging Face repository, which is downloaded into "
        "Hugging Face's cache unless it is there",
    )
    served_model_name: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="name of the model: its id in the API and its label in metrics. Several, separated by commas, are "
        "all accepted, and the first is the id in answers and the label; unset: the repository's name, or the folder's",
    )
    metrics_port: int = Field(ge=0, le=65535, description="port of Prometheus' /metrics; 0: no metrics")
    reflection: bool = Field(True, description="gRPC server reflection, which lists methods and message types")
    metrics_tls: bool = Field(False, description="serve /metrics with the same TLS as --listen")

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        return separated(value)

    @model_validator(mode="after")
    def _complete_metrics_tls(self) -> Self:
        if self.metrics_tls and self.tls_cert is None:
            raise StartupError("--metrics-tls True needs --tls-cert, which is not set")
        return self


class CallerSettings(ListenerSettings):
    """What calls services has."""

    upstream_tls_ca: Path | None = Field(
        None,
        description="certificate authorities in PEM: upstream services are called with TLS and must have a certificate "
        "from one of them",
    )
    upstream_token_file: Path | None = Field(None, description="file with the bearer token for upstream services")
    allow_plaintext_token: bool = Field(
        False, description="send the token to other machines without TLS, if something else protects the network"
    )


class UpstreamSettings(ServiceSettings, CallerSettings):
    """Settings of the encoder and of generation, which compute with the model and call other services."""

    adapters: Annotated[
        tuple[Annotated[AdapterFolder, PlainValidator(AdapterFolder.parse), PlainSerializer(str)], ...], NoDecode
    ] = Field(
        (),
        description="LoRA adapters that requests may name, NAME=DIR separated by commas, folders in PEFT's format: "
        "traffic=/models/traffic-lora,sports=/models/sports-lora; the encoder needs those that change the vision tower "
        "or its projector, and ignores what others change; needs PEFT (the extra lora)",
    )

    @field_validator("adapters", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return separated(value)

    @field_validator("adapters")
    @classmethod
    def _unique_names(cls, value: tuple[AdapterFolder, ...]) -> tuple[AdapterFolder, ...]:
        names = [each.name for each in value]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f"two adapters are named {twice!r}")
        return value


def separated(value: object) -> object:
    """A list, for text separated by commas."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def flag_of(name: str) -> str:
    """--max-model-len, for the field max_model_len."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """GRIDSIEVE_MAX_MODEL_LEN, for the field max_model_len."""
    return _PREFIX + name.upper()
