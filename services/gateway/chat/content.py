"""Content parts as parts of a prompt. The bytes say whether a part is an image or a video, neither its name nor a type.

An animation (GIF, APNG, animated AVIF) is both: its first picture in an image_url, a video elsewhere. Preprocessing
reads the bytes. The one type with a meaning is that of a video whose frames are pictures:

data:video/jpeg;base64,…,…,…         media_io_kwargs say when each is shown
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from common.contract.data_urls import DataUrl, parse_data_url
from common.contract.errors import InvalidRequest
from framesieve.client.prompt import Frames, Image, Message, Part, Text, Video
from services.gateway.chat.request import (
    ChatMessage,
    ChatRequest,
    FilePart,
    ImageURLPart,
    InputVideoPart,
    Location,
    MediaPart,
    TextPart,
    VideoURLPart,
)

_FRAMES = "video/jpeg"
"""Not a video format: vLLM's name for a list of pictures."""


Uploads: TypeAlias = Callable[[str], str]
"""The path below preprocessing's --media-root of an uploaded file. Raises InvalidRequest."""
Source: TypeAlias = dict[str, Any]
"""Where media come from, for Image and Video."""


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
        Text(part.text) if isinstance(part, TextPart) else _media(part, f"{name}[{place}]", request, uploads)
        for place, part in enumerate(message.content)
    ]


def _media(part: MediaPart, name: str, request: ChatRequest, uploads: Uploads) -> Image | Video:
    source = _source(part, name, uploads)
    pruning = part.pruning.parsed() if part.pruning else None
    if "pictures" in source:
        reading = _reading(request, part)
        times = _times(len(source["pictures"]), reading, name)
        chosen = {"num_frames": reading.get("num_frames")} | _chosen(request, part)
        return Video(frames=Frames(source["pictures"], times), **chosen, pruning=pruning)
    kind = Image if isinstance(part, ImageURLPart) else Video
    return kind(**source, **_read(_reading(request, part)), **_chosen(request, part), pruning=pruning)


def _reading(request: ChatRequest, part: MediaPart) -> dict[str, Any]:
    """media_io_kwargs.video: the part's own fields before the request's."""
    given = (each.media_io_kwargs.video for each in (request, part) if each.media_io_kwargs)
    return {
        name: value for reading in given if reading for name, value in reading.model_dump(exclude_none=True).items()
    }


def _chosen(request: ChatRequest, part: MediaPart) -> dict[str, Any]:
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
            return _located(part.image_url, f"{name}.image_url")
        case VideoURLPart():
            return _located(part.video_url, f"{name}.video_url")
        case InputVideoPart():
            return _located(part.input_video, f"{name}.input_video")
        case FilePart():
            return _filed(part, f"{name}.file", uploads)


def _located(location: Location | str, name: str) -> Source:
    name, url = (name, location) if isinstance(location, str) else (f"{name}.url", location.url)
    match url.partition(":")[0].lower():
        case "data":
            return _inline(url, name)
        case "http" | "https" | "file":
            return {"url": url}
    raise InvalidRequest(f"{name} must start with https://, http://, file:// or data:, got {url[:40]!r}")


def _inline(url: str, name: str) -> Source:
    try:
        found = parse_data_url(url)
        return {"pictures": found.files} if found.type == _FRAMES else {"data": found.data}
    except InvalidRequest as error:
        raise InvalidRequest(f"{name} {error}") from None


def _filed(part: FilePart, name: str, uploads: Uploads) -> Source:
    file = part.file
    if (file.file_data is None) == (file.file_id is None):
        raise InvalidRequest(f"{name} must have exactly one of file_data and file_id")
    if file.file_data is None:
        return {"server_path": uploads(file.file_id or "")}
    if file.file_data[:5].lower() == "data:":
        return _inline(file.file_data, f"{name}.file_data")
    try:
        return {"data": DataUrl("", is_base64=True, body=file.file_data.encode()).data}
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}.file_data {error}") from None
