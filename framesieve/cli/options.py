"""Command-line options that several commands share, and their conversion to client types."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from framesieve.client.credentials import Access
from framesieve.client.messages import IN_PYTHON
from framesieve.client.prompt import Image, Message, Options, Video, check_scheme, is_url
from framesieve.client.prompt import Pruning as Said
from framesieve.common.contract.errors import FramesieveError, InvalidRequest, path_of, steps_of
from framesieve.common.contract.retention import (
    AUTO_THRESHOLD,
    EVS,
    EVS_CAUSAL,
    NONE,
    PIXEL_CHANGE,
    RANDOM,
    VCAST,
    VIDCOM2,
    Pruning,
    named_method,
)
from framesieve.common.security.tokens import read_token

_MEDIA = "Media"
SAMPLING = "Model and sampling (defaults: the model's)"
OUTPUT = "Output"
_CONNECTION = "Connection"

# Fields of requests that have flags of another name.
_FLAGS = {
    "pruning.rate": "--pruning-rate",
    "pruning.method": "--method",
    "pruning.threshold": "--pruning-threshold",
    "adapter": "--adapter",
    "open.pruning": "--method",
    "open.source": "SOURCE",
    "window_tokens": "--window-tokens",
    "prompt.template_options.enable_thinking": "--thinking",
}
_REMEDIES = {IN_PYTHON: "send a larger file as a path below --media-root with --on-server, or as a URL"}
_NAME_CHARACTERS = 200  # of a URL, in an error

_RATE_HELP = "Fraction of each video's tokens to drop, at least 0 and below 1."
RateOption = Annotated[
    float | None,
    typer.Option("--pruning-rate", help=f"{_RATE_HELP} Default: the service's.", rich_help_panel=_MEDIA),
]
DrawnRateOption = Annotated[
    float | None,
    typer.Option(
        "--pruning-rate",
        help=f"{_RATE_HELP} Default: 0.75, and 0 with --pruning-threshold.",
        rich_help_panel=_MEDIA,
    ),
]
THRESHOLD_HELP = (
    "Let the rate follow from the video: drop tokens whose pixels changed by less than this share of their range, such "
    f"as {AUTO_THRESHOLD:g}, and at least --pruning-rate. Implies --method {PIXEL_CHANGE}."
)
ThresholdOption = Annotated[
    float | None, typer.Option("--pruning-threshold", help=THRESHOLD_HELP, rich_help_panel=_MEDIA)
]
_METHOD_HELP = (
    f"Which tokens are kept. {EVS}: those that changed most since the previous slice. {EVS_CAUSAL}: those of each "
    f"slice that did, as many in each. {VIDCOM2}: those least similar to the rest of their slice and video, some in "
    f"every slice. {VCAST}: the most distinctive of each slice, more where the video's course bends. {RANDOM}: a "
    f"random choice. {PIXEL_CHANGE}: those of each slice whose pixels changed most, chosen before the vision tower. "
    f"{NONE}: all."
)
MethodOption = Annotated[
    str | None, typer.Option("--method", help=f"{_METHOD_HELP} Default: the service's.", rich_help_panel=_MEDIA)
]
MethodsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help=f"{_METHOD_HELP} Repeat it to compare methods side by side. Default: {EVS}.",
        rich_help_panel=_MEDIA,
    ),
]
FpsOption = Annotated[
    float | None,
    typer.Option(help="Frames to sample per second. Default: the model's.", rich_help_panel=_MEDIA),
]
MaxFramesOption = Annotated[
    int | None,
    typer.Option(help="Maximum number of frames to sample. Default: the model's.", rich_help_panel=_MEDIA),
]
NumFramesOption = Annotated[
    int | None,
    typer.Option(
        help="Number of frames, evenly spaced, or all if there are fewer; in place of --fps.", rich_help_panel=_MEDIA
    ),
]
MaxPixelsOption = Annotated[
    int | None,
    typer.Option(help="Resize each frame or image to at most this many pixels.", rich_help_panel=_MEDIA),
]
StartOption = Annotated[float | None, typer.Option(help="Start at this second of each video.", rich_help_panel=_MEDIA)]
EndOption = Annotated[float | None, typer.Option(help="End at this second of each video.", rich_help_panel=_MEDIA)]
TruncatedOption = Annotated[
    bool,
    typer.Option(
        "--allow-truncated",
        help="Accept videos that were cut off, even if more than a tenth of the frames is missing.",
        rich_help_panel=_MEDIA,
    ),
]
OnServerOption = Annotated[
    bool,
    typer.Option(
        "--on-server",
        help="Media are paths below preprocessing's --media-root, not files on this machine.",
        rich_help_panel=_MEDIA,
    ),
]
SystemOption = Annotated[
    str | None, typer.Option(help="System message: instructions for the model.", rich_help_panel=SAMPLING)
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(help="Randomness of the choice; 0: always the most likely token.", rich_help_panel=SAMPLING),
]
TopPOption = Annotated[
    float | None,
    typer.Option(help="Sample from the most likely tokens with this total probability.", rich_help_panel=SAMPLING),
]
SeedOption = Annotated[
    int | None,
    typer.Option(help="Seed of sampling; the same seed gives the same completion.", rich_help_panel=SAMPLING),
]
MaxNewTokensOption = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of tokens of a completion. Default: as many as fit, at most 1024.", rich_help_panel=OUTPUT
    ),
]
AdapterOption = Annotated[
    str | None,
    typer.Option(help="Name of a LoRA adapter that generation has loaded (--adapters).", rich_help_panel=SAMPLING),
]
ThinkingOption = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking",
        help="Whether the model thinks before it answers, if it can do both. Default: the chat template's.",
        rich_help_panel=SAMPLING,
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json", help="Print the result, or the error, as one JSON object on stdout.", rich_help_panel=OUTPUT
    ),
]

ServerOption = Annotated[
    str,
    typer.Option(
        envvar="FRAMESIEVE_SERVER",
        help="Address of generation, host:port; several replicas separated by commas.",
        rich_help_panel=_CONNECTION,
    ),
]
TimeoutOption = Annotated[
    float | None, typer.Option(help="Deadline of each request, in seconds. Default: none.", rich_help_panel=_CONNECTION)
]
TlsCaOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        envvar=["FRAMESIEVE_TLS_CA", "FRAMESIEVE_UPSTREAM_TLS_CA"],
        help="Use TLS, and verify the service's certificate with the authorities in this PEM file.",
        rich_help_panel=_CONNECTION,
    ),
]
TlsCertOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert", envvar="FRAMESIEVE_TLS_CERT", help="Client certificate (PEM).", rich_help_panel=_CONNECTION
    ),
]
TlsKeyOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-key", envvar="FRAMESIEVE_TLS_KEY", help="Private key of --tls-cert (PEM).", rich_help_panel=_CONNECTION
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help="File with the bearer token to send. Default: the variable FRAMESIEVE_TOKEN.",
        rich_help_panel=_CONNECTION,
    ),
]
PlaintextTokenOption = Annotated[
    bool,
    typer.Option(
        "--allow-plaintext-token",
        envvar="FRAMESIEVE_ALLOW_PLAINTEXT_TOKEN",
        help="Send the token to other machines even without TLS.",
        rich_help_panel=_CONNECTION,
    ),
]


def access_of(
    tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None, token_file: Path | None, plaintext_token: bool
) -> Access:
    """The connection options. Raises StartupError for a token file without a valid token."""
    token = read_token("--token-file", token_file) if token_file else os.environ.get("FRAMESIEVE_TOKEN")
    return Access(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, token=token, allow_plaintext_token=plaintext_token)


def pruning_of(rate: float, method: str | None, threshold: float | None) -> Pruning:
    """Raises BadParameter for an invalid rate or threshold, an unknown method, and one that has no threshold."""
    with _bad_parameters():
        return Pruning(rate, named_method(method, threshold), threshold=threshold)


def pruning_options(rate: float | None, method: str | None, threshold: float | None) -> Options:
    """Of a request; None: not said. Raises as `pruning_of`."""
    said = said_pruning(rate, method, threshold)
    return Options(pruning_rate=said.rate, pruning_method=said.method, pruning_threshold=said.threshold)


def said_pruning(rate: float | None, method: str | None, threshold: float | None) -> Said:
    """Of a request; None: not said. Raises as `pruning_of`."""
    with _bad_parameters():
        return Said(rate, method, threshold=threshold)


def template_options(thinking: bool | None) -> Mapping[str, bool]:
    """Variables of the chat template. thinking: None, as it does by default."""
    return {} if thinking is None else {"enable_thinking": thinking}


@contextmanager
def _bad_parameters() -> Iterator[None]:
    try:
        with in_flags():
            yield
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error


def media_part(location: str, on_server: bool, max_pixels: int | None, **of_videos: Any) -> Video:
    """The video or image, as its bytes are, that an argument names: a URL, a path on the server or a local file."""
    try:
        check_scheme(location)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error
    source: dict[str, Any] = {"url" if is_url(location) else "server_path" if on_server else "path": location}
    return Video(**source, max_pixels=max_pixels, **of_videos)


@contextmanager
def in_flags(messages: Sequence[Message] = ()) -> Iterator[None]:
    """Puts flags, and the names of the media of these messages, into errors in place of the request's fields.

    "prompt.messages[0].parts[0].video.frame_sampling.fps must be …" becomes "--fps of clip.mp4 must be …".
    """
    try:
        yield
    except FramesieveError as error:
        error.rename(partial(_flag, messages=messages), _REMEDIES)
        raise


def _flag(field: str, messages: Sequence[Message]) -> str:
    match steps_of(field):
        case "frame_sampling" | "sampling", _, *_:
            return f"--{field.partition('.')[2].replace('_', '-')}"
        case "prompt", "messages", int(number), "parts", int(place), "image" | "video", *rest:
            if (name := _media_name(messages, number, place)) is None or rest[:1] == ["embeds"]:
                return field
            if rest in ([], ["data"], ["url"]):
                return name
            inner = _flag(path_of(*rest), messages)
            return inner if len(rest) == 1 else f"{inner} of {name}"
        case "open", "triggers", int(), str(name):
            return _flag(f"open.{name}", messages)
        case "open", "triggers", int(), *rest:
            return _flag(path_of(*rest), messages)
        case "open", name if field not in _FLAGS:
            return f"--{str(name).replace('_', '-')}"
    return _FLAGS.get(field, field)


def _media_name(messages: Sequence[Message], number: int, place: int) -> str | None:
    """The file or URL of a media item; None where it is neither."""
    parts = messages[number].parts if number < len(messages) else ()
    part = parts[place] if place < len(parts) else None
    if not isinstance(part, Image | Video):
        return None
    name = part.path or part.server_path or (part.url and part.url[:_NAME_CHARACTERS])
    return os.fspath(name) if name else None


def print_json(value: dict[str, Any] | list[dict[str, Any]]) -> None:
    typer.echo(json.dumps(value, default=_plain, ensure_ascii=False))


def _plain(value: object) -> Any:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} cannot be converted to JSON")
