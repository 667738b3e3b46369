"""Command-line options that several commands share, and their conversion to client types."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from pathlib import Path, PurePath
from typing import Annotated, Any

import typer

from gridsieve.client.credentials import Access
from gridsieve.client.messages import IN_PYTHON
from gridsieve.client.prompt import (
    Audio,
    FrameOptions,
    Image,
    Message,
    Options,
    Pruning,
    Sampling,
    Video,
    check_scheme,
    file_name,
    is_url,
)
from gridsieve.common.contract.errors import GridsieveError, InvalidRequest, path_of, steps_of
from gridsieve.common.contract.plan import KEYFRAMES, SHOTS, UNIFORM
from gridsieve.common.contract.retention import (
    AUTO_THRESHOLD,
    EVS,
    EVS_CAUSAL,
    NONE,
    PIXEL_CHANGE,
    RANDOM,
    SUGGESTED,
    VCAST,
    VIDCOM2,
)
from gridsieve.common.media_files import kind_of
from gridsieve.common.security.tokens import read_token

# Options, by the panel of the help that they stand in.
of_media = partial(typer.Option, rich_help_panel="Media")
of_sampling = partial(typer.Option, rich_help_panel="Model and sampling (defaults: the model's)")
of_output = partial(typer.Option, rich_help_panel="Output")
_of_connection = partial(typer.Option, rich_help_panel="Connection")
_of_recording = partial(typer.Option, rich_help_panel="Recording")

# Fields of requests that have flags of another name.
_FLAGS = {
    "pruning.rate": "--pruning-rate",
    "pruning.method": "--pruning-method",
    "pruning.threshold": "--pruning-threshold",
    "audio": "--audio",
    "adapter": "--adapter",
    "open.pruning": "--pruning-method",
    "open.source": "SOURCE",
    "window_tokens": "--window-tokens",
    "prompt.template_options.enable_thinking": "--thinking",
}
_REMEDIES = {IN_PYTHON: "send a larger file as a path below --media-root with --on-server, or as a URL"}
_NAME_CHARACTERS = 200  # of a URL, in an error

_RATE_HELP = "Fraction of each video's tokens to drop, at least 0 and below 1."
_SUGGESTION = f"{SUGGESTED.method} with a threshold of {SUGGESTED.threshold:g}"
DrawnRateOption = Annotated[
    float | None,
    of_media(help=f"{_RATE_HELP} Default without --pruning-threshold: {_SUGGESTION}."),
]
THRESHOLD_HELP = (
    "Let the rate follow from the video: drop tokens whose pixels changed by less than this share of their range, such "
    f"as {AUTO_THRESHOLD:g}, and at least --pruning-rate. Implies --pruning-method {PIXEL_CHANGE}."
)
ThresholdOption = Annotated[float | None, of_media(help=THRESHOLD_HELP)]
_METHOD_HELP = (
    f"Which tokens are kept. {EVS}: the tokens that changed most since the previous slice. {EVS_CAUSAL}: the same, "
    f"but equally many in each slice. {VIDCOM2}: the tokens least similar to the rest of their slice and video, some "
    f"in every slice. {VCAST}: the most distinctive tokens of each slice, more where the video's course bends. "
    f"{RANDOM}: a random choice. {PIXEL_CHANGE}: the tokens whose pixels changed most, chosen before the vision "
    f"tower. {NONE}: all."
)
MethodsOption = Annotated[
    list[str] | None,
    of_media(
        help=f"{_METHOD_HELP} Repeat the flag to compare methods side by side. Default, with a rate: {PIXEL_CHANGE} if "
        f"the model takes it, else {EVS}."
    ),
]
MaxPixelsOption = Annotated[int | None, of_media(help="Resize each frame or image to at most this many pixels.")]
NumFramesOption = Annotated[
    int | None, of_media(help="Number of frames, evenly spaced, or all if there are fewer; in place of --fps.")
]
SystemOption = Annotated[str | None, of_sampling(help="System message: instructions for the model.")]
AdapterOption = Annotated[
    str | None, of_sampling(help="Name of a LoRA adapter that generation has loaded (--adapters).")
]
ThinkingOption = Annotated[
    bool | None,
    of_sampling(
        "--thinking/--no-thinking",
        help="Whether the model thinks before it answers, if it can do both. Default: the chat template's.",
    ),
]
JsonOption = Annotated[bool, of_output("--json", help="Print the result, or the error, as one JSON object on stdout.")]
ServerOption = Annotated[
    str,
    _of_connection(
        envvar="GRIDSIEVE_SERVER", help="Address of generation, host:port; several replicas separated by commas."
    ),
]
_of_embedder = partial(_of_connection, envvar="GRIDSIEVE_EMBEDDER")
EmbedderOption = Annotated[str, _of_embedder(help="Address of generation, host:port, whose model embeds.")]
OptionalEmbedderOption = Annotated[
    str | None, _of_embedder(help="Address of generation, host:port, whose model made the index of the folder.")
]
StoreOption = Annotated[
    str | None,
    _of_connection(help="URL of a Postgres with pgvector, postgresql://…. Default: a file in the folder."),
]
FolderArgument = Annotated[
    Path, typer.Argument(exists=True, file_okay=False, help="A folder of films, with the folders below it.")
]
TimeoutOption = Annotated[float | None, _of_connection(help="Deadline of each request, in seconds. Default: none.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningFlags:
    """How videos are pruned; None: as the service does."""

    pruning_rate: Annotated[float | None, of_media(help=f"{_RATE_HELP} Default: the service's.")] = None
    pruning_method: Annotated[str | None, of_media(help=f"{_METHOD_HELP} Default: the service's.")] = None
    pruning_threshold: ThresholdOption = None

    def options(self) -> Options:
        """Raises BadParameter as `said_pruning`."""
        said = said_pruning(self.pruning_rate, self.pruning_method, self.pruning_threshold)
        return Options(pruning_rate=said.rate, pruning_method=said.method, pruning_threshold=said.threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameFlags:
    """Where media are, and which of their frames are used, in which size."""

    fps: Annotated[float | None, of_media(help="Frames to sample per second. Default: the model's.")] = None
    max_frames: Annotated[int | None, of_media(help="Maximum number of frames to sample. Default: the model's.")] = None
    mode: Annotated[
        str | None,
        of_media(
            help=f"Which frames are used. {UNIFORM}: evenly spread ones. {KEYFRAMES}: as many keyframes, or all if "
            "there are fewer; they cost a fraction of the decoding, but miss what happens between them. "
            f"{SHOTS}: as many, among them the first frame of each shot. Default: {UNIFORM}."
        ),
    ] = None
    max_pixels: MaxPixelsOption = None
    allow_truncated: Annotated[
        bool,
        of_media(
            "--allow-truncated",
            help="Accept videos that were cut off, even if more than a tenth of the frames is missing.",
        ),
    ] = False
    on_server: Annotated[
        bool,
        of_media("--on-server", help="Media are paths below preprocessing's --media-root, not files on this machine."),
    ] = False

    def options(self) -> FrameOptions:
        """Of the moments of a folder."""
        return FrameOptions(
            fps=self.fps,
            max_frames=self.max_frames,
            max_pixels=self.max_pixels,
            mode=self.mode,
            allow_truncated=self.allow_truncated or None,
        )

    def part(self, location: str, **more: Any) -> Video:
        """The video or image, as its bytes are, that an argument names: a URL, a path on the server or a local file.

        more: other fields of the video.
        """
        fields: dict[str, Any] = {**asdict(self), **more, self._source(location): location}
        del fields["on_server"]
        return Video(**fields)

    def _source(self, location: str) -> str:
        """The field of a part that says where an argument is. Raises BadParameter for a URL of another scheme."""
        try:
            check_scheme(location)
        except InvalidRequest as error:
            raise typer.BadParameter(str(error)) from error
        return "url" if is_url(location) else "server_path" if self.on_server else "path"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipFlags(FrameFlags):
    start_s: Annotated[float | None, of_media(help="Start at this second of each video and sound.")] = None
    end_s: Annotated[float | None, of_media(help="End at this second of each video and sound.")] = None

    def heard(self, location: str, *, audio: bool, **more: Any) -> Video | Audio:
        """A sound, where an argument's name ends as one; else as `part`. audio: of a video: its sound is heard."""
        if kind_of(PurePath(file_name(location))) != "audio":
            return self.part(location, audio=audio, **more)
        source: dict[str, Any] = {self._source(location): location}
        return Audio(start_s=self.start_s, end_s=self.end_s, **source)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingFlags:
    """Where what is watched is kept."""

    index: Annotated[
        Path | None,
        _of_recording(
            help="Keep what is seen in this folder: films of ten seconds, a picture a slice, and an index of them by "
            "--embedder, for `gridsieve search`, `gridsieve ask FOLDER` and --recall."
        ),
    ] = None
    embedder: OptionalEmbedderOption = None
    store: StoreOption = None

    def check(self) -> None:
        """Raises BadParameter for a folder without an embedder."""
        if self.index is not None and self.embedder is None:
            raise typer.BadParameter("--index needs --embedder, the address of the model of its index")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    temperature: Annotated[
        float | None, of_sampling(help="Randomness of the choice; 0: always the most likely token.")
    ] = None
    top_p: Annotated[
        float | None, of_sampling(help="Sample from the most likely tokens with this total probability.")
    ] = None
    seed: Annotated[int | None, of_sampling(help="Seed of sampling; the same seed gives the same completion.")] = None
    max_new_tokens: Annotated[
        int | None, of_output(help="Maximum number of tokens of a completion. Default: as many as fit, at most 1024.")
    ] = None

    def options(self) -> Sampling:
        return Sampling(
            temperature=self.temperature, top_p=self.top_p, seed=self.seed, max_new_tokens=self.max_new_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessFlags:
    tls_ca: Annotated[
        Path | None,
        _of_connection(
            envvar=["GRIDSIEVE_TLS_CA", "GRIDSIEVE_UPSTREAM_TLS_CA"],
            help="Use TLS, and verify the service's certificate with the authorities in this PEM file.",
        ),
    ] = None
    tls_cert: Annotated[Path | None, _of_connection(envvar="GRIDSIEVE_TLS_CERT", help="Client certificate (PEM).")] = (
        None
    )
    tls_key: Annotated[
        Path | None, _of_connection(envvar="GRIDSIEVE_TLS_KEY", help="Private key of --tls-cert (PEM).")
    ] = None
    token_file: Annotated[
        Path | None, _of_connection(help="File with the bearer token to send. Default: the variable GRIDSIEVE_TOKEN.")
    ] = None
    allow_plaintext_token: Annotated[
        bool,
        _of_connection(
            "--allow-plaintext-token",
            envvar="GRIDSIEVE_ALLOW_PLAINTEXT_TOKEN",
            help="Send the token to other machines even without TLS.",
        ),
    ] = False

    def access(self) -> Access:
        """Raises StartupError for a token file without a valid token."""
        token = read_token("--token-file", self.token_file) if self.token_file else os.environ.get("GRIDSIEVE_TOKEN")
        return Access(
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            token=token,
            allow_plaintext_token=self.allow_plaintext_token,
        )


def said_pruning(rate: float | None, method: str | None, threshold: float | None) -> Pruning:
    """Of a request; None: not said.

    Raises BadParameter for an invalid rate or threshold, an unknown method, and one that has no threshold.
    """
    try:
        with in_flags():
            return Pruning(rate, method, threshold=threshold)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error


def template_options(thinking: bool | None) -> Mapping[str, bool]:
    """Variables of the chat template. thinking: None, as it does by default."""
    return {} if thinking is None else {"enable_thinking": thinking}


@contextmanager
def in_flags(messages: Sequence[Message] = ()) -> Iterator[None]:
    """Puts flags, and the names of the media of these messages, into errors in place of the request's fields.

    "prompt.messages[0].parts[0].video.frame_sampling.fps must be …" becomes "--fps of clip.mp4 must be …".
    """
    try:
        yield
    except GridsieveError as error:
        rename(error, messages)
        raise


def rename(error: GridsieveError, messages: Sequence[Message]) -> None:
    """As `in_flags`, of an error that is not raised."""
    error.rename(partial(_flag, messages=messages), _REMEDIES)


def _flag(field: str, messages: Sequence[Message]) -> str:
    match steps_of(field):
        case "sampling", "json_schema":
            return "--schema"
        case "sampling", "moments", *_:
            return "--moments" if field == "sampling.moments" else "--grain-s"
        case "frame_sampling" | "sampling", _, *_:
            return f"--{field.partition('.')[2].replace('_', '-')}"
        case "prompt", "messages", int(number), "parts", int(place), "image" | "video" | "audio", *rest:
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
    if not isinstance(part, Image | Video | Audio):
        return None
    name = part.path or part.server_path or (part.url and part.url[:_NAME_CHARACTERS])
    return os.fspath(name) if name else None


def print_json(value: dict[str, Any] | list[dict[str, Any]]) -> None:
    typer.echo(json.dumps(value, default=_plain, ensure_ascii=False))


def _plain(value: object) -> Any:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} cannot be converted to JSON")
