"""Command-line options that several commands share, and their conversion to client types."""

from __future__ import annotations

import json
import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from common.contract.errors import InvalidRequest
from common.contract.retention import EVS, NONE, RANDOM, VIDCOM2, Pruning
from common.security.tokens import read_token
from framesieve.client.credentials import Access
from framesieve.client.prompt import Image, Video, is_url, names_image

_ACCESS = "TLS and authentication"

RateOption = Annotated[
    float, typer.Option("--pruning-rate", help="Fraction of each video's tokens to drop, at least 0 and below 1.")
]
MethodOption = Annotated[
    str,
    typer.Option(
        "--method",
        help=f"Which tokens are kept. {EVS}: those that changed most since the previous slice. {VIDCOM2}: those least "
        f"similar to the rest of their slice and video, some in every slice. {RANDOM}: a random choice. {NONE}: all.",
    ),
]
FpsOption = Annotated[float | None, typer.Option(help="Frames to sample per second. Default: the model's.")]
MaxFramesOption = Annotated[int | None, typer.Option(help="Maximum number of frames to sample. Default: the model's.")]
OnServerOption = Annotated[
    bool,
    typer.Option("--on-server", help="Media are paths below preprocessing's --media-root, not files on this machine."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]

TlsCaOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        envvar=["FRAMESIEVE_TLS_CA", "FRAMESIEVE_UPSTREAM_TLS_CA"],
        help="Use TLS; verify the service's certificate against the authorities in this PEM file.",
        rich_help_panel=_ACCESS,
    ),
]
TlsCertOption = Annotated[
    Path | None,
    typer.Option("--tls-cert", envvar="FRAMESIEVE_TLS_CERT", help="Client certificate (PEM).", rich_help_panel=_ACCESS),
]
TlsKeyOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-key", envvar="FRAMESIEVE_TLS_KEY", help="Private key of --tls-cert (PEM).", rich_help_panel=_ACCESS
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file", help="File with the bearer token to send. Default: $FRAMESIEVE_TOKEN.", rich_help_panel=_ACCESS
    ),
]
PlaintextTokenOption = Annotated[
    bool,
    typer.Option(
        "--allow-plaintext-token",
        envvar="FRAMESIEVE_ALLOW_PLAINTEXT_TOKEN",
        help="Send the token to other machines even without TLS.",
        rich_help_panel=_ACCESS,
    ),
]


def access_of(
    tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None, token_file: Path | None, plaintext_token: bool
) -> Access:
    """The connection options. Raises StartupError for a token file without a valid token."""
    token = read_token("--token-file", token_file) if token_file else os.environ.get("FRAMESIEVE_TOKEN")
    return Access(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, token=token, allow_plaintext_token=plaintext_token)


def pruning_of(rate: float, method: str) -> Pruning:
    """Raises BadParameter for an invalid rate or an unknown method."""
    try:
        return Pruning(rate, method)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error


def media_part(location: str, fps: float | None, max_frames: int | None, on_server: bool) -> Image | Video:
    """The Image or Video (by suffix) that an argument names: a URL, a path on the server or a local file."""
    source: dict[str, Any] = {"url" if is_url(location) else "server_path" if on_server else "path": location}
    if names_image(location):
        return Image(**source)
    return Video(**source, fps=fps, max_frames=max_frames)


def print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, default=_plain, ensure_ascii=False))


def _plain(value: object) -> Any:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} cannot be converted to JSON")
