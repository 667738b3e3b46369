"""Content parts as parts of a prompt. What a part holds follows from its MIME type, not from the part's name.

data:video/mp4;base64,…              a video
data:image/png;base64,…              an image, also in a video_url
data:video/jpeg;base64,…,…,…         a video whose frames are pictures; media_io_kwargs say when each is shown
https://host/clip.mp4?…              by its suffix; without one that is known, by the part's name
an uploaded file                     by the type that it was uploaded with
"""

from __future__ import annotations

import base64
import binascii
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from common.contract.errors import InvalidRequest
from framesieve.client.prompt import Frames, Image, Message, Part, Text, Video, names_image
from services.gateway.chat.request import (
    ChatMessage,
    ChatRequest,
    FilePart,
    ImageURLPart,
    InputVideoPart,
    Location,
    MediaOptions,
    MediaPart,
    TextPart,
    VideoURLPart,
)
from services.gateway.files import Uploads

_FRAMES = "video/jpeg"
"""Not a video format: vLLM's name for a list of pictures."""
_ANIMATED = ("image/gif", "image/apng", "image/avif")
"""Images that are videos where a part asks for one."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where media come from, for Image and Video. type: the MIME type, "" where it is unknown."""

    type: str
    given: Mapping[str, Any]


def conversation(request: ChatRequest, uploads: Uploads) -> list[Message]:
    """The turns. Raises InvalidRequest for a part that cannot be what it says."""
    messages = []
    for number, message in enumerate(request.messages):
        role = "system" if message.role == "developer" else message.role
        messages.append(Message(role, tuple(_parts(message, f"messages[{number}].content", request, uploads))))
    return messages


def _parts(message: ChatMessage, name: str, request: ChatRequest, uploads: Uploads) -> list[Part]:
    if isinstance(message.content, str):
        return [Text(message.content)]
    return [
        Text(part.text) if isinstance(part, TextPart) else _of_part(part, f"{name}[{place}]", request, uploads)
        for place, part in enumerate(message.content)
    ]


def _of_part(part: MediaPart, name: str, request: ChatRequest, uploads: Uploads) -> Image | Video:
    asks_for_video = isinstance(part, VideoURLPart | InputVideoPart)
    return media(_source(part, name, uploads), name, part, request, asks_for_video=asks_for_video)


def media(
    source: Source, name: str, part: MediaOptions, request: MediaOptions, *, asks_for_video: bool = False
) -> Image | Video:
    """An image or a video. part: its own options, before those of the request. name: of the part, for errors.

    asks_for_video: an animated image is a video, and so is what has no type. Raises InvalidRequest.
    """
    if _is_image(source, asks_for_video):
        _check_image(part, name)
        return Image(**source.given, max_pixels=_chosen(request, part).get("max_pixels"))
    pruning = part.pruning.parsed() if part.pruning else None
    if source.type == _FRAMES:
        reading = _reading(request, part)
        times = _times(len(source.given["pictures"]), reading, name)
        chosen = {"num_frames": reading.get("num_frames")} | _chosen(request, part)
        return Video(frames=Frames(source.given["pictures"], times), **chosen, pruning=pruning)
    return Video(**source.given, **_read(_reading(request, part)), **_chosen(request, part), pruning=pruning)


def _check_image(part: MediaOptions, name: str) -> None:
    useless = "pruning" if part.pruning else "media_io_kwargs" if part.media_io_kwargs else ""
    if part.mm_processor_kwargs and not useless:
        useless = next(
            (f"mm_processor_kwargs.{each}" for each in part.mm_processor_kwargs.model_fields_set - {"max_pixels"}), ""
        )
    if useless:
        raise InvalidRequest(f"{name}.{useless} must not be set: the part is an image")


def _is_image(source: Source, asks_for_video: bool) -> bool:
    if source.type.startswith("image/"):
        return not (asks_for_video and source.type in _ANIMATED)
    return False if source.type.startswith("video/") else not asks_for_video


def _reading(request: MediaOptions, part: MediaOptions) -> dict[str, Any]:
    """media_io_kwargs.video: the part's own fields before the request's."""
    given = (each.media_io_kwargs.video for each in (request, part) if each.media_io_kwargs)
    return {
        name: value for reading in given if reading for name, value in reading.model_dump(exclude_none=True).items()
    }


def _chosen(request: MediaOptions, part: MediaOptions) -> dict[str, Any]:
    """mm_processor_kwargs as fields of Video: the part's own before the request's."""
    given = (each.mm_processor_kwargs for each in (request, part) if each.mm_processor_kwargs)
    names = {"video_start": "start_s", "video_end": "end_s"}
    return {
        names.get(name, name): value for choice in given for name, value in choice.model_dump(exclude_none=True).items()
    }


def _read(reading: Mapping[str, Any]) -> dict[str, Any]:
    """media_io_kwargs.video as fields of Video."""
    names = {"frames_indices": "frame_indices", "duration": "end_s"}
    return {names.get(name, name): value for name, value in reading.items()}


def _times(frames: int, reading: Mapping[str, Any], name: str) -> tuple[float, ...]:
    """When each of the frames that came as pictures is shown, in seconds: one a second, unless media_io_kwargs tell.

    frames_indices: of the pictures in the video that they were taken from. fps: of that video, or duration of it.
    """
    places = reading.get("frames_indices") or range(frames)
    if len(places) != frames:
        raise InvalidRequest(f"{name} holds {frames} frames, and frames_indices of media_io_kwargs.video {len(places)}")
    if "fps" in reading and "duration" in reading:
        raise InvalidRequest("media_io_kwargs.video.duration must not be set with fps: each gives the time of a frame")
    step_s = reading["duration"] / frames if "duration" in reading else 1 / (reading.get("fps") or 1.0)
    return tuple(place * step_s for place in places)


def _source(part: MediaPart, name: str, uploads: Uploads) -> Source:
    match part:
        case ImageURLPart():
            return _located(part.image_url, f"{name}.image_url", "image/")
        case VideoURLPart():
            return _located(part.video_url, f"{name}.video_url", "video/")
        case InputVideoPart():
            return _located(part.input_video, f"{name}.input_video", "video/")
        case FilePart():
            return _filed(part, f"{name}.file", uploads)


def _located(location: Location | str, name: str, usual: str) -> Source:
    if isinstance(location, str):
        return located(location, name, usual)
    return located(location.url, f"{name}.url", usual)


def located(url: str, name: str, usual: str) -> Source:
    """What a URL locates. usual: its type where the URL tells none. Raises InvalidRequest."""
    scheme = url.partition(":")[0].lower()
    if scheme == "data":
        return _inline(url, name)
    if scheme in ("http", "https"):
        return Source("image/" if names_image(url) else mimetypes.guess_type(url)[0] or usual, {"url": url})
    raise InvalidRequest(f"{name} must start with https://, http:// or data:, got {url[:40]!r}")


def _inline(url: str, name: str) -> Source:
    """Source: RFC 2397."""
    head, comma, body = url.partition(",")
    if not comma:
        raise InvalidRequest(f"{name} must be data:<type>;base64,<bytes>, and has no comma")
    kind, *parameters = head.removeprefix("data:").removeprefix("DATA:").split(";")
    is_base64 = bool(parameters) and parameters[-1].strip().lower() == "base64"
    kind = kind.strip().lower()
    if kind == _FRAMES:
        if not is_base64:
            raise InvalidRequest(f"{name} must be base64: frames are separated by commas")
        return Source(kind, {"pictures": tuple(_decoded(frame, name) for frame in body.split(","))})
    return Source(kind, {"data": _decoded(body, name) if is_base64 else unquote_to_bytes(body)})


def _decoded(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{name} is not base64: {error}") from None


def _filed(part: FilePart, name: str, uploads: Uploads) -> Source:
    file = part.file
    if (file.file_data is None) == (file.file_id is None):
        raise InvalidRequest(f"{name} must have exactly one of file_data and file_id")
    if file.file_data is not None:
        return contained(file.file_data, file.filename, f"{name}.file_data")
    return uploaded(file.file_id or "", uploads)


def contained(data: str, filename: str | None, name: str) -> Source:
    """A file's bytes, as a data: URL or as base64 of the type that its name tells. Raises InvalidRequest."""
    if data.startswith("data:"):
        return _inline(data, name)
    return Source(mimetypes.guess_type(filename or "")[0] or "video/", {"data": _decoded(data, name)})


def uploaded(file_id: str, uploads: Uploads) -> Source:
    """A file of POST /v1/files. Raises InvalidRequest."""
    path, kind = uploads(file_id)
    return Source(kind, {"server_path": path})
