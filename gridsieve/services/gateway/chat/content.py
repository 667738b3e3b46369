"""Content parts as parts of a prompt. The bytes say whether a part is an image or a video, neither its name nor a type;
a sound is one by the type of its part.

An animation (GIF, APNG, animated AVIF) is both: its first picture in an image_url, a video elsewhere. Preprocessing
reads the bytes. The one type with a meaning is that of a video whose frames are pictures:

data:video/jpeg;base64,…,…,…         media_io_kwargs say when each is shown
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from gridsieve.client.prompt import Audio, Frames, Image, Message, Part, Pruning, Text, Video
from gridsieve.client.tools import ToolCall
from gridsieve.common.contract.data_urls import DataUrl, parse_data_url
from gridsieve.common.contract.errors import InvalidRequest, within
from gridsieve.services.gateway.chat.names import FieldNames, MediaNames, TurnNames
from gridsieve.services.gateway.chat.request import (
    AnyPart,
    AudioPart,
    ChatMessage,
    ChatRequest,
    EmbedsPart,
    FilePart,
    ImageEmbedsPart,
    ImageURLPart,
    InputAudioPart,
    Location,
    MediaOptions,
    MediaPart,
    Pruned,
    TextPart,
    VideoOptions,
)
from gridsieve.services.gateway.files import Uploads
from gridsieve.services.gateway.http.fields import Strict

_FRAMES = "video/jpeg"
"""Not a video format: vLLM's name for a list of pictures."""
_MAX_FRAMES = 768
"""Of a video, as FrameSampling has them."""
_COUNTS = {"fps", "num_frames", "min_frames", "max_frames"}
_LOCATIONS_OF_FILES = ("file_data", "file_id")
_CHOSEN_NAMES = {
    "video_start": "start_s",
    "video_end": "end_s",
    "max_slice_nums": "max_slices",
    "use_audio_in_video": "audio",
}
_READ_NAMES = {"frames_indices": "frame_indices", "duration": "end_s"}

Source: TypeAlias = dict[str, Any]
"""Where media come from, for Image and Video."""


P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Turn:
    message: Message
    names: TurnNames


def turns_of(request: ChatRequest, uploads: Uploads) -> list[Turn]:
    """Raises InvalidRequest for a part that cannot be what it says, and for one that its role cannot have."""

    def read(part: AnyPart, name: str) -> tuple[Part, MediaNames | None]:
        return part_of(part, name, request, uploads)

    turns = []
    for number, message in enumerate(request.messages):
        name = f"messages[{number}]"
        _check_role(message, name)
        parts, names = content_of(message.content, f"{name}.content", read)
        calls = message.tool_calls or ()
        turn = Message(
            "system" if message.role == "developer" else message.role,
            parts,
            tuple(ToolCall(each.id, each.function.name, each.function.arguments) for each in calls),
            message.tool_call_id or "",
            (message.name or "") if message.role == "tool" else "",
            message.reasoning_content or message.reasoning or "",
        )
        of_calls = [f"{name}.tool_calls[{place}]" for place in range(len(calls))]
        turns.append(Turn(turn, replace(names, turn=name, call_id=f"{name}.tool_call_id", calls=of_calls)))
    return turns


def names_of(turns: Sequence[Turn], options: Mapping[str, str]) -> FieldNames:
    """options: as of FieldNames."""
    return FieldNames([turn.names for turn in turns], "messages", options, ("function",))


def content_of(
    content: str | Sequence[P] | None, name: str, read: Callable[[P, str], tuple[Part, MediaNames | None]]
) -> tuple[tuple[Part, ...], TurnNames]:
    """The parts of a turn, and where they came from.

    read: makes a part of one in the content, whose name it gets; with its names, if it is an image or a video.
    """
    if content is None:
        return (), TurnNames("", name)
    if isinstance(content, str):
        return (Text(content),), TurnNames("", name)
    names = [f"{name}[{number}]" for number in range(len(content))]
    parts = [read(part, place) for part, place in zip(content, names, strict=True)]
    media = {number: of_media for number, (_, of_media) in enumerate(parts) if of_media}
    return tuple(part for part, _ in parts), TurnNames("", name, parts=names, media=media)


def _check_role(message: ChatMessage, name: str) -> None:
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"must not be set: the role is {message.role}", field=f"{name}.tool_calls")
    for field in ("reasoning_content", "reasoning"):
        if getattr(message, field) and message.role != "assistant":
            raise InvalidRequest(f"must not be set: the role is {message.role}", field=f"{name}.{field}")
    if message.tool_call_id is not None and message.role != "tool":
        raise InvalidRequest(f"must not be set: the role is {message.role}", field=f"{name}.tool_call_id")
    if message.tool_call_id is None and message.role == "tool":
        raise InvalidRequest("must be set: the role is tool", field=f"{name}.tool_call_id")
    if message.content is None and not message.tool_calls:
        raise InvalidRequest(field=f"{name}.content", limit="set")


def media_names(part: MediaOptions, request: MediaOptions, here: str, location: str) -> MediaNames:
    """The names of a part's fields for errors. here: the part. location: its field that says where its media are."""
    sampling: dict[str, str] = {}
    for of, given in (("", request), (f"{here}.", part)):
        if reading := given.media_io_kwargs and given.media_io_kwargs.video:
            for name in reading.model_fields_set:
                sampling[_READ_NAMES.get(name, name)] = f"{of}media_io_kwargs.video.{name}"
                if name == "num_frames":
                    sampling["max_frames"] = sampling[name]
        if choice := given.mm_processor_kwargs:
            for name in choice.model_fields_set:
                sampling[_CHOSEN_NAMES.get(name, name)] = f"{of}mm_processor_kwargs.{name}"
    audio = sampling.pop("audio", "")
    if isinstance(part, VideoOptions) and part.audio is not None:
        audio = f"{here}.audio"
    return MediaNames(f"{here}.{location}", f"{here}.pruning" if part.pruning else "pruning", audio, sampling)


def _location_of(part: MediaPart) -> str:
    """The field of a part that says where its media are."""
    if isinstance(part, FilePart):
        return f"file.{location_in(part.file, _LOCATIONS_OF_FILES)}"
    return location_in(part, [part.type])


def location_in(part: Strict, fields: Sequence[str]) -> str:
    """The one of these fields that is set, of an object its URL."""
    field = next(field for field in fields if getattr(part, field) is not None)
    return f"{field}.url" if isinstance(getattr(part, field), Location) else field


def part_of(part: AnyPart, name: str, request: MediaOptions, uploads: Uploads) -> tuple[Part, MediaNames | None]:
    """The part of a message, and its names if it is no text. request: with options of all its media."""
    if isinstance(part, TextPart):
        return Text(part.text), None
    if isinstance(part, AudioPart):
        return sound_of(part, name, request)
    if isinstance(part, EmbedsPart):
        return _of_embeds(part, name), MediaNames(
            f"{name}.{part.type}", f"{name}.pruning" if part.pruning else "pruning"
        )
    source = _source(part, name, uploads)
    item = media(source, name, part, request, asks_for_image=isinstance(part, ImageURLPart))
    return item, media_names(part, request, name, _location_of(part))


def sound_of(part: AudioPart, name: str, request: MediaOptions) -> tuple[Audio, MediaNames]:
    """Raises InvalidRequest for data that are not base64, and a URL that cannot be one of a sound."""
    heard, names = dict[str, Any](), dict[str, str]()
    for of, given in (("", request), (f"{name}.", part)):
        for field in ("video_start", "video_end"):
            if (value := getattr(given.mm_processor_kwargs, field, None)) is not None:
                heard[_CHOSEN_NAMES[field]] = value
                names[_CHOSEN_NAMES[field]] = f"{of}mm_processor_kwargs.{field}"
    if isinstance(part, InputAudioPart):
        place = f"{name}.input_audio.data"
        with within(place):
            data = DataUrl("", is_base64=True, body=part.input_audio.data.encode()).data
        return Audio(data=data, **heard), MediaNames(place, sampling=names)
    place = f"{name}.{location_in(part, [part.type])}"
    source = _located(part.audio_url if isinstance(part.audio_url, str) else part.audio_url.url, place)
    if "pictures" in source:
        raise InvalidRequest(f"must hold a sound, got {_FRAMES}", field=place)
    return Audio(**source, **heard), MediaNames(place, sampling=names)


def _of_embeds(part: EmbedsPart, name: str) -> Image | Video:
    pruning = _own_pruning(part, name)
    with within(f"{name}.{part.type}"):
        if isinstance(part, ImageEmbedsPart):
            return Image(embeds=part.image_embeds.parsed(), pruning=pruning)
        return Video(embeds=part.video_embeds.parsed(), pruning=pruning)


def media(
    source: Source, name: str, part: MediaOptions, request: MediaOptions, *, asks_for_image: bool
) -> Image | Video:
    """What a source holds. part: its own options, before those of the request. name: of the part, for errors.

    asks_for_image: of an animation the first picture is meant. Raises InvalidRequest.
    """
    pruning, chosen = _own_pruning(part, name), _chosen(request, part)
    if asks_for_image:
        chosen.pop("audio", None)
    elif isinstance(part, VideoOptions) and part.audio is not None:
        chosen["audio"] = part.audio
    if "pictures" in source:
        reading = _reading(request, part)
        times = _times(len(source["pictures"]), reading, name)
        count = {"num_frames": reading["num_frames"]} if "num_frames" in reading else {}
        sampling = _read(count, chosen)
        return Video(frames=Frames(source["pictures"], times), **sampling, pruning=pruning)
    kind = Image if asks_for_image else Video
    return kind(**source, **_read(_reading(request, part), chosen), pruning=pruning)


def _own_pruning(part: Pruned, name: str) -> Pruning | None:
    with within(name):
        return part.pruning.parsed() if part.pruning else None


def _reading(request: MediaOptions, part: MediaOptions) -> dict[str, Any]:
    """media_io_kwargs.video: the part's own fields before the request's."""
    given = (each.media_io_kwargs.video for each in (request, part) if each.media_io_kwargs)
    return {
        name: value for reading in given if reading for name, value in reading.model_dump(exclude_none=True).items()
    }


def _chosen(request: MediaOptions, part: MediaOptions) -> dict[str, Any]:
    """mm_processor_kwargs as fields of Video: the part's own before the request's."""
    given = (each.mm_processor_kwargs for each in (request, part) if each.mm_processor_kwargs)
    return {
        _CHOSEN_NAMES.get(name, name): value
        for choice in given
        for name, value in choice.model_dump(exclude_none=True, exclude={"do_sample_frames"}).items()
        if (name, value) != ("num_frames", -1)
    }


def _read(reading: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """media_io_kwargs.video as fields of Video, before those of mm_processor_kwargs, which count more.

    Read is the least of num_frames, of what fps asks for, and of what there is; neither is a bound at 0 or below.
    Source: `compute_frames_index_to_sample` of vLLM's video loader.
    """
    read = {_READ_NAMES.get(name, name): value for name, value in reading.items() if name not in ("fps", "num_frames")}
    fps, frames = reading.get("fps") or 0.0, reading.get("num_frames")
    most = min(frames, _MAX_FRAMES) if frames is not None and frames > 0 else _MAX_FRAMES
    if fps > 0:
        read |= {"fps": fps} if frames is None else {"fps": fps, "min_frames": 1, "max_frames": most}
    elif chosen.keys() & _COUNTS:
        read |= {"max_frames": most} if frames is not None and frames > 0 and "num_frames" not in chosen else {}
    elif frames is not None and (frames > 0 or "frame_indices" not in read):
        read["num_frames"] = most
    return read | dict(chosen)


def _times(frames: int, reading: Mapping[str, Any], name: str) -> tuple[float, ...]:
    """When each of the frames that came as pictures is shown, in seconds: one a second, unless media_io_kwargs tell.

    frames_indices: of the pictures in the video that they were taken from. fps: of that video, or duration of it.
    """
    places = reading.get("frames_indices") or range(frames)
    if len(places) != frames:
        text = f"holds {frames} frames, and frames_indices of media_io_kwargs.video {len(places)}"
        raise InvalidRequest(text, field=name)
    fps = reading.get("fps") or 0.0
    if fps > 0 and "duration" in reading:
        text = "must not be set with fps: each gives the time of a frame"
        raise InvalidRequest(text, field="media_io_kwargs.video.duration")
    step_s = reading["duration"] / frames if "duration" in reading else 1 / (fps if fps > 0 else 1.0)
    return tuple(place * step_s for place in places)


def _source(part: MediaPart, name: str, uploads: Uploads) -> Source:
    if isinstance(part, FilePart):
        return source_of(part.file, _LOCATIONS_OF_FILES, f"{name}.file", uploads)
    location: Location | str = getattr(part, part.type)
    return _located(location if isinstance(location, str) else location.url, f"{name}.{_location_of(part)}")


def source_of(part: Strict, fields: Sequence[str], name: str, uploads: Uploads) -> Source:
    """What is in the one of these fields that is set. Raises InvalidRequest if none is, or several."""
    given = [field for field in fields if getattr(part, field) is not None]
    if len(given) != 1:
        text = f"must have exactly one of {', '.join(fields[:-1])} and {fields[-1]}"
        raise InvalidRequest(text, field=name)
    (field,) = given
    value: Location | str = getattr(part, field)
    if isinstance(value, Location):
        return _located(value.url, f"{name}.{field}.url")
    match field:
        case "file_id":
            return {"url": uploads(value)}
        case "file_data":
            return _contained(value, f"{name}.{field}")
    return _located(value, f"{name}.{field}")


def _located(url: str, name: str) -> Source:
    """What a URL locates. Raises InvalidRequest for one of another scheme, and for a data: URL that is none."""
    match url.partition(":")[0].lower():
        case "data":
            return _inline(url, name)
        case "http" | "https" | "file":
            return {"url": url}
    text = f"must start with https://, http://, file:// or data:, got {url[:40]!r}"
    raise InvalidRequest(text, field=name, value=url[:40])


def _inline(url: str, name: str) -> Source:
    with within(name):
        found = parse_data_url(url)
        return {"pictures": found.files} if found.type == _FRAMES else {"data": found.data}


def _contained(data: str, name: str) -> Source:
    """A file's bytes, as a data: URL or as base64. Raises InvalidRequest."""
    if data[:5].lower() == "data:":
        return _inline(data, name)
    with within(name):
        return {"data": DataUrl("", is_base64=True, body=data.encode()).data}
