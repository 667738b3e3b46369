"""Options that several commands of `framesieve` have, and what becomes of them."""

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

_ACCESS = "Services that do not answer everybody"

RateOption = Annotated[
    float, typer.Option("--pruning-rate", help="Share of each video's tokens to drop, at least 0 and below 1.")
]
MethodOption = Annotated[
    str,
    typer.Option(
        "--method",
        help=f"Which tokens are kept. {EVS}: what changed since the slice before. {VIDCOM2}: what is least like the "
        f"rest of its slice and video, some of each slice. {RANDOM}: any, by lot. {NONE}: all, whatever the rate.",
    ),
]
FpsOption = Annotated[float | None, typer.Option(help="Frames a second to look at. Default: the model's own.")]
MaxFramesOption = Annotated[int | None, typer.Option(help="At most this many frames. Default: the model's own.")]
OnServerOption = Annotated[bool, typer.Option("--on-server", help="Media are paths below the server's --media-root.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

TlsCaOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        envvar=["FRAMESIEVE_TLS_CA", "FRAMESIEVE_UPSTREAM_TLS_CA"],
        help="Speak TLS: authorities, in PEM, that may have issued the service's certificate.",
        rich_help_panel=_ACCESS,
    ),
]
TlsCertOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert", envvar="FRAMESIEVE_TLS_CERT", help="Certificate, in PEM, to show.", rich_help_panel=_ACCESS
    ),
]
TlsKeyOption = Annotated[
    Path | None,
    typer.Option("--tls-key", envvar="FRAMESIEVE_TLS_KEY", help="Its private key, in PEM.", rich_help_panel=_ACCESS),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file", help="File with the bearer token to show. Default: $FRAMESIEVE_TOKEN.", rich_help_panel=_ACCESS
    ),
]
PlaintextTokenOption = Annotated[
    bool,
    typer.Option(
        "--allow-plaintext-token",
        envvar="FRAMESIEVE_ALLOW_PLAINTEXT_TOKEN",
        help="Show it to other machines without TLS as well.",
        rich_help_panel=_ACCESS,
    ),
]


def access_of(
    tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None, token_file: Path | None, plaintext_token: bool
) -> Access:
    """Raises StartupError for a file that holds no token."""
    token = read_token("--token-file", token_file) if token_file else os.environ.get("FRAMESIEVE_TOKEN")
    return Access(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, token=token, allow_plaintext_token=plaintext_token)


def pruning_of(rate: float, method: str) -> Pruning:
    """Raises BadParameter for a rate or a method that does not exist."""
    try:
        return Pruning(rate, method)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error


def media_part(location: str, fps: float | None, max_frames: int | None, on_server: bool) -> Image | Video:
    """What an argument names: an image or a video by its suffix, on this machine, the server's or elsewhere."""
    source: dict[str, Any] = {"url" if is_url(location) else "server_path" if on_server else "path": location}
    if names_image(location):
        return Image(**source)
    return Video(**source, fps=fps, max_frames=max_frames)


def print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, default=_plain, ensure_ascii=False))


def _plain(value: object) -> Any:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} has no JSON form")
