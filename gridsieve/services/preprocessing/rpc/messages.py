"""Converts a protobuf prompt to a checked conversation, and plans and slices to protobuf.

It checks everything that can be checked before media are opened; dataclasses check their own values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

from gridsieve.common.contract.data_urls import parse_data_url
from gridsieve.common.contract.errors import InvalidRequest, MediaRejected, within
from gridsieve.common.contract.limits import MAX_INLINE_BYTES
from gridsieve.common.contract.plan import Grid, Modality, PromptPlan
from gridsieve.common.contract.requests import check_inline_bytes, check_prompt
from gridsieve.common.contract.tensors import DType, pieces
from gridsieve.common.contract.uploads import upload_path
from gridsieve.common.contract.wire import ago_s, fill_chunk, int32_tensor, plan_messages, tensor_digest
from gridsieve.services.preprocessing.conversation import (
    Conversation,
    FileUrl,
    MediaFile,
    MediaRequest,
    MediaUrl,
    Upload,
)
from gridsieve.services.preprocessing.fetch.urls import file_path
from gridsieve.services.preprocessing.prompt.embeds import Embeds
from gridsieve.services.preprocessing.prompt.turns import Tool, ToolCall, Turn
from gridsieve.services.preprocessing.video.pictures import PictureFrames
from gridsieve.services.preprocessing.video.sampling import MAX_FRAMES, FrameSampling
from gridsieve.services.preprocessing.video.slices import Slice
from gridsieve.v1 import preprocessing_pb2, prompt_pb2

# A family may put text around each slice: planning far more slices would take minutes.
MAX_EMBEDS_SLICES = 2**15
# Keeps one prompt from flooding another server with requests.
MAX_URLS = 32

_A = {Modality.IMAGE: "an image", Modality.VIDEO: "a video", Modality.AUDIO: "a sound"}
_ROLES = {
    prompt_pb2.ROLE_SYSTEM: "system",
    prompt_pb2.ROLE_USER: "user",
    prompt_pb2.ROLE_ASSISTANT: "assistant",
    prompt_pb2.ROLE_TOOL: "tool",
}


def conversation_of(prompt: prompt_pb2.Prompt, max_inline_bytes: int = MAX_INLINE_BYTES) -> Conversation:
    """Checks a prompt. Decodes data URLs, so call it outside the event loop's thread.

    Raises InvalidRequest with the field that is missing, empty or too large; MediaRejected for an empty data URL;
    MediaForbidden for a file URL with a host.
    """
    check_prompt(prompt, max_inline_bytes)
    if not prompt.messages:
        raise InvalidRequest("must hold at least one message, it is empty", field="prompt.messages")
    tools = tuple(_tool(tool, f"prompt.tools[{index}]") for index, tool in enumerate(prompt.tools))
    options = _object(prompt.template_options, "prompt.template_options")
    turns: list[Turn] = []
    called: dict[str, str] = {}  # names of the tools, by the ids of calls
    media: list[MediaRequest] = []
    for index, message in enumerate(prompt.messages):
        name = f"prompt.messages[{index}]"
        if message.role not in _ROLES:
            raise InvalidRequest(field=f"{name}.role", limit="system, user, assistant or tool", value=message.role)
        if not message.parts and not message.tool_calls:
            raise InvalidRequest("must hold at least one part, it is empty", field=f"{name}.parts")
        parts: list[str | Modality] = []
        for place, part in enumerate(message.parts):
            content = _part(part, f"{name}.parts[{place}]")
            if isinstance(content, MediaRequest):
                media.append(content)
                parts.append(content.modality)
            else:
                parts.append(content)
        calls = _tool_calls(message, name)
        called |= {call.id: call.name for call in calls}
        if message.thought and message.role != prompt_pb2.ROLE_ASSISTANT:
            raise InvalidRequest(field=f"{name}.thought", limit="empty for another role than assistant")
        result = _result_of(message, name, called)
        turns.append(Turn(_ROLES[message.role], tuple(parts), calls, *result, message.thought))
    if not any(part for turn in turns for part in (*turn.parts, *turn.tool_calls)):
        raise InvalidRequest("hold no media and only empty text", field="prompt.messages")
    _check_sums(media, max_inline_bytes)
    return Conversation(tuple(turns), tuple(media), tools, options, prompt.cache_salt)


def _tool(tool: prompt_pb2.Tool, name: str) -> Tool:
    parameters = _object(tool.parameters, f"{name}.parameters") or {"type": "object", "properties": {}}
    return Tool(tool.name, tool.description if tool.HasField("description") else None, parameters)


def _tool_calls(message: prompt_pb2.Message, name: str) -> tuple[ToolCall, ...]:
    if message.tool_calls and message.role != prompt_pb2.ROLE_ASSISTANT:
        raise InvalidRequest(field=f"{name}.tool_calls", limit="empty for another role than assistant")
    calls = []
    for index, call in enumerate(message.tool_calls):
        if not call.name:
            raise InvalidRequest(field=f"{name}.tool_calls[{index}].name", limit="set")
        arguments = _object(call.arguments, f"{name}.tool_calls[{index}].arguments")
        calls.append(ToolCall(call.id, call.name, arguments))
    return tuple(calls)


def _result_of(message: prompt_pb2.Message, name: str, called: Mapping[str, str]) -> tuple[str, str]:
    """The id and the name of the call whose result a message is. called: names by the ids of earlier calls."""
    if message.role != prompt_pb2.ROLE_TOOL:
        for field in ("tool_call_id", "tool_name"):
            if getattr(message, field):
                raise InvalidRequest(field=f"{name}.{field}", limit="empty for another role than tool")
    return message.tool_call_id, message.tool_name or called.get(message.tool_call_id, "")


def _object(text: str, name: str) -> dict[str, Any]:
    """A JSON object; an empty one for no text."""
    try:
        value = json.loads(text or "{}")
        json.dumps(value, ensure_ascii=False).encode()  # half a character can be written as JSON, but not be tokenised
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"is not JSON: {error}", field=name) from None
    if not isinstance(value, dict):
        raise InvalidRequest(field=name, limit="a JSON object", value=text)
    return value


def _part(part: prompt_pb2.Part, name: str) -> str | MediaRequest:
    kind = part.WhichOneof("content")
    if kind is None:
        raise InvalidRequest("must hold text, image, video or audio, it holds none", field=name)
    if kind == "text":
        return part.text
    return _media(getattr(part, kind), Modality(kind), f"{name}.{kind}")


def _check_sums(media: Sequence[MediaRequest], max_inline_bytes: int) -> None:
    """Raises InvalidRequest for too many inline bytes, URLs or slices of embeddings in the whole prompt."""
    embeds = [item.location for item in media if isinstance(item.location, Embeds)]
    files = [len(item.location) for item in media if isinstance(item.location, bytes)]
    files += [item.location.size_bytes for item in media if isinstance(item.location, Embeds | MediaFile)]
    check_inline_bytes(sum(files), max_inline_bytes)
    urls = sum(isinstance(item.location, MediaUrl) for item in media)
    if urls > MAX_URLS:
        text = f"hold {urls} media by URL, at most {MAX_URLS} are allowed"
        raise InvalidRequest(text, field="prompt.messages", value=urls, limit=MAX_URLS)
    slices = sum(each.grid.t for each in embeds)
    if slices > MAX_EMBEDS_SLICES:
        text = f"hold embeddings of {slices} temporal slices, at most {MAX_EMBEDS_SLICES} are allowed"
        raise InvalidRequest(text, field="prompt.messages", value=slices, limit=MAX_EMBEDS_SLICES)


def _media(media: prompt_pb2.Media, modality: Modality, name: str) -> MediaRequest:
    source = media.WhichOneof("source")
    if source is None:
        raise InvalidRequest("must hold data, data_bytes, url, path, frames or embeds, it holds none", field=name)
    if media.audio and (modality is not Modality.VIDEO or source in ("frames", "embeds")):
        text = f"is for video files, got the {source} of {_A[modality]}"
        raise InvalidRequest(text, field=f"{name}.audio")
    if source == "frames":
        return _frames(media, modality, name)
    if source != "embeds":
        location = getattr(media, source)
        if source == "url":
            location = _location(media.url, name)
        elif source == "data_bytes":
            location = MediaFile(media.data_bytes)
        return MediaRequest(name, modality, location, _sampling(media.frame_sampling, name), hears=media.audio)
    if modality is Modality.AUDIO:
        raise InvalidRequest("is for images and videos only", field=f"{name}.embeds", remedy="send the sound as `data`")
    if media.HasField("frame_sampling"):
        raise InvalidRequest("must not be set with embeds, which have no frames", field=f"{name}.frame_sampling")
    return MediaRequest(name, modality, _embeds(media.embeds, modality, name), FrameSampling())


def _frames(media: prompt_pb2.Media, modality: Modality, name: str) -> MediaRequest:
    """A video whose frames are pictures: their bytes one after the other, or the size of what follows the prompt."""
    if modality is not Modality.VIDEO:
        raise InvalidRequest("is for videos only", field=f"{name}.frames", remedy="send the file as `data`")
    pictures, sizes = list(media.frames.pictures), list(media.frames.sizes_bytes)
    if pictures and sizes:
        raise InvalidRequest("must hold pictures or sizes_bytes, it holds both", field=f"{name}.frames")
    if not 0 <= (left_out := media.frames.left_out) < MAX_FRAMES:
        raise InvalidRequest(field=f"{name}.frames.left_out", limit=f"from 0 to {MAX_FRAMES - 1}", value=left_out)
    ends = tuple(accumulate([*[0] * left_out, *(sizes or map(len, pictures))]))
    with within(name):
        frames = PictureFrames(ends, tuple(media.frames.timestamps_s), media.frames.by_time, left_out)
    location = MediaFile(ends[-1]) if sizes else b"".join(pictures)
    return MediaRequest(name, modality, location, _sampling(media.frame_sampling, name), frames)


def _location(url: str, name: str) -> MediaUrl | FileUrl | Upload | bytes:
    """A URL to fetch, the path of a file URL or of an upload, or the bytes of a data URL."""
    with within(f"{name}.url"):
        match url.partition(":")[0].lower():
            case "data":
                data = parse_data_url(url).data
            case "file":
                return FileUrl(file_path(url))
            case "upload":
                return Upload(upload_path(url))
            case _:
                return MediaUrl(url)
        if not data:
            raise MediaRejected("is empty")
        return data


def _embeds(message: prompt_pb2.MediaEmbeds, modality: Modality, name: str) -> Embeds:
    if not message.HasField("grid"):
        raise InvalidRequest(field=f"{name}.embeds.grid", limit="set")
    step = message.seconds_per_grid
    if message.HasField("seconds_per_grid") and step.denominator < 1:
        field = f"{name}.embeds.seconds_per_grid.denominator"
        raise InvalidRequest(field=field, limit="at least 1", value=step.denominator)
    try:
        grid = Grid(message.grid.t, message.grid.h, message.grid.w)
    except ValueError as error:
        raise InvalidRequest(f"is invalid: {error}", field=f"{name}.embeds.grid") from error
    with within(name):
        return Embeds(
            modality=modality,
            grid=grid,
            size_bytes=len(message.tensor.data),
            digest=message.digest or tensor_digest(message.tensor),
            seconds_per_grid=Fraction(step.numerator, step.denominator) if step.denominator else None,
            timestamps_s=tuple(message.timestamps_s),
            tile_columns=message.tile_columns,
        )


def _sampling(message: prompt_pb2.FrameSampling, name: str) -> FrameSampling:
    given = {field.name: value for field, value in message.ListFields()}
    if message.frame_indices:
        given["frame_indices"] = tuple(message.frame_indices)
    with within(name):
        return FrameSampling(**given)


def plan_responses(plan: PromptPlan, fetched_ns: int | None) -> Iterator[preprocessing_pb2.PreprocessResponse]:
    """The plan in chunks. The first chunk says how long ago the last URL was fetched, if any was."""
    fetched_ago_s = None if fetched_ns is None else ago_s(fetched_ns)
    for message in plan_messages(plan):
        yield preprocessing_pb2.PreprocessResponse(plan=message, fetched_ago_s=fetched_ago_s)
        fetched_ago_s = None


def frames_responses(
    media_index: int, piece: Slice, shared: bool = False
) -> Iterator[preprocessing_pb2.PreprocessResponse]:
    """One slice in chunks. The first chunk says how many frames were repaired and how long ago it was made.

    shared: it was handed over in shared memory, and is one chunk without bytes. One that repeats another is one message
    without a chunk.
    """
    first: dict[str, Any] = {
        "repaired_frames": piece.repaired_frames,
        "decoded_ago_s": ago_s(piece.decoded_ns),
        "resized_ago_s": ago_s(piece.resized_ns),
        "reference": piece.reference,
    }
    if piece.repeats is not None:
        frames = preprocessing_pb2.FramesChunk(
            media_index=media_index, first_frame=piece.first_frame, repeats_frame=piece.repeats, **first
        )
        yield preprocessing_pb2.PreprocessResponse(frames=frames)
        return
    first |= {"kept": None if piece.kept is None else int32_tensor(piece.kept), "digest": piece.digest}
    data = piece.pixels.data if piece.pixels.size else memoryview(b"")
    dtype = DType[piece.pixels.dtype.name.upper()]
    for offset, part in [(0, None)] if shared else pieces(data):
        frames = preprocessing_pb2.FramesChunk(media_index=media_index, first_frame=piece.first_frame, **first)
        response = preprocessing_pb2.PreprocessResponse(frames=frames)
        fill_chunk(response.frames.chunk, dtype, piece.pixels.shape, offset, part)
        yield response
        first = {}
