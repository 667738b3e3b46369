"""The common parts of the three services' requests: limits of a prompt, and the selection of media items.

Each service checks these limits before it iterates over a prompt. The values of single fields are checked where they
are read.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.limits import LARGER_FILES, MAX_INLINE_BYTES
from gridsieve.common.contract.plan import MediaPlan
from gridsieve.common.contract.retention import ItemPruning, reference_bytes
from gridsieve.common.contract.tensors import MAX_PIECE_BYTES, PIECE_BYTES, pieces
from gridsieve.common.contract.wire import MAX_MEDIA, MEDIA_KINDS, named_items, named_media
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.encoder_pb2 import EncodeRequest
from gridsieve.v1.preprocessing_pb2 import PreprocessRequest

Requests: TypeAlias = AsyncIterator[PreprocessRequest] | AsyncIterator[EncodeRequest]

# Messages and parts together. Loops over them block the event loop and thereby all other requests.
MAX_PARTS = 2**14
# A tokenizer needs about a second per MiB.
MAX_TEXT_BYTES = 4 * 2**20
# The frames of one video that are pictures.
MAX_PICTURES = 768
MAX_TOOLS = 512
MAX_SALT_CHARACTERS = 256
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def check_prompt(prompt: prompt_pb2.Prompt, max_inline_bytes: int = MAX_INLINE_BYTES) -> None:
    """Raises InvalidRequest for a prompt with too many parts, media, bytes of inline media or bytes of text, and for a
    cache salt that is too long or not printable."""
    _check_parts(prompt)
    if len(prompt.cache_salt) > MAX_SALT_CHARACTERS or not prompt.cache_salt.isprintable():
        limit = f"at most {MAX_SALT_CHARACTERS} printable characters"
        raise InvalidRequest(field="prompt.cache_salt", limit=limit)
    named = [(name, item) for name, _, item in named_media(prompt)]
    media = [item for _, item in named]
    _check("media", sum(1 for _ in named_items(prompt)), MAX_MEDIA)
    for name, item in named:
        _check_pictures(name, item)
        for field, sizes in (("data_bytes", [item.data_bytes]), ("frames.sizes_bytes", item.frames.sizes_bytes)):
            if (min_bytes := min(sizes, default=0)) < 0:
                raise InvalidRequest(field=f"{name}.{field}", limit="at least 1", value=min_bytes)
    check_inline_bytes(sum(map(_inline_bytes, media)), max_inline_bytes)
    check_tools(prompt)
    texts = [part.text for message in prompt.messages for part in message.parts]
    texts += [
        text for message in prompt.messages for text in (message.tool_call_id, message.tool_name, message.thought)
    ]
    calls = [call for message in prompt.messages for call in message.tool_calls]
    texts += [text for call in calls for text in (call.id, call.name, call.arguments)]
    texts += [text for tool in prompt.tools for text in (tool.name, tool.description, tool.parameters)]
    _check("bytes of text", sum(len(text.encode()) for text in (*texts, prompt.template_options)), MAX_TEXT_BYTES)


def check_tools(prompt: prompt_pb2.Prompt) -> None:
    """Raises InvalidRequest for too many tools, and for invalid or duplicate names."""
    if len(prompt.tools) > MAX_TOOLS:
        raise InvalidRequest(field="prompt.tools", limit=f"at most {MAX_TOOLS} tools", value=len(prompt.tools))
    names = set()
    for index, tool in enumerate(prompt.tools):
        field = f"prompt.tools[{index}].name"
        if not _TOOL_NAME.fullmatch(tool.name):
            limit = "1 to 128 letters, digits and characters of _-.:/"
            raise InvalidRequest(field=field, limit=limit, value=tool.name)
        if tool.name in names:
            raise InvalidRequest(f"must be unique, {tool.name} is an earlier tool's", field=field, value=tool.name)
        names.add(tool.name)


def _check_pictures(name: str, media: prompt_pb2.Media) -> None:
    for field in ("pictures", "timestamps_s", "sizes_bytes"):
        if (count := len(getattr(media.frames, field))) > MAX_PICTURES:
            raise InvalidRequest(field=f"{name}.frames.{field}", limit=f"at most {MAX_PICTURES} values", value=count)


def _inline_bytes(media: prompt_pb2.Media) -> int:
    brought = len(media.data) + len(media.embeds.tensor.data) + sum(map(len, media.frames.pictures))
    return brought + _announced_bytes(media)


def _announced_bytes(media: prompt_pb2.Media) -> int:
    """The size of the file that follows the prompt, or of the pictures, which follow it as one file; 0 for neither."""
    return media.data_bytes + sum(media.frames.sizes_bytes)


def _check_parts(prompt: prompt_pb2.Prompt) -> None:
    parts = len(prompt.messages)
    for message in prompt.messages[: MAX_PARTS + 1]:
        parts += len(message.parts) + len(message.tool_calls)
    _check("messages and parts", parts, MAX_PARTS)


def check_inline_bytes(size_bytes: int, max_inline_bytes: int) -> None:
    """Raises InvalidRequest for too many bytes of inline media, files and embeddings together."""
    if size_bytes > max_inline_bytes:
        text = f"hold {size_bytes} bytes of inline media, --max-inline-bytes is {max_inline_bytes}"
        raise InvalidRequest(
            text, field="prompt.messages", value=size_bytes, limit=max_inline_bytes, remedy=LARGER_FILES
        )


def _check(what: str, count: int, limit: int) -> None:
    if count > limit:
        text = f"hold {count} {what}, at most {limit} are allowed in total"
        raise InvalidRequest(text, field="prompt.messages", value=count, limit=limit)


def detach_files(prompt: prompt_pb2.Prompt) -> tuple[prompt_pb2.Prompt, list[bytes]]:
    """A copy of the prompt that announces its larger files by their sizes, and these files, in order.

    The pictures of a video are one file. Raises InvalidRequest for a prompt with too many parts, and for one that
    announces a file itself: a question brings its files.
    Reads each file once, since every read of a field of bytes copies them.
    """
    _check_parts(prompt)
    for name, _, item in named_media(prompt):
        _check_pictures(name, item)
        if item.WhichOneof("source") == "data_bytes":
            raise InvalidRequest("announces a file that would follow", field=f"{name}.data_bytes", remedy="send `data`")
        if item.frames.sizes_bytes:
            field = f"{name}.frames.sizes_bytes"
            raise InvalidRequest("announces files that would follow", field=field, remedy="send `frames.pictures`")
    files = []
    without = prompt_pb2.Prompt(
        tools=prompt.tools,
        template_options=prompt.template_options,
        cache_salt=prompt.cache_salt,
        yields=prompt.yields,
    )
    for message in prompt.messages:
        copy = without.messages.add(
            role=message.role,
            tool_calls=message.tool_calls,
            tool_call_id=message.tool_call_id,
            tool_name=message.tool_name,
            thought=message.thought,
        )
        for part in message.parts:
            kind = part.WhichOneof("content")
            media = getattr(part, kind) if kind in MEDIA_KINDS else None
            source = None if media is None else media.WhichOneof("source")
            if media is None or source not in ("data", "frames") or media.ByteSize() <= PIECE_BYTES:
                copy.parts.add().CopyFrom(part)
                continue
            detached = getattr(copy.parts.add(), kind)
            if source == "data":
                files.append(media.data)
                detached.data_bytes = len(files[-1])
            else:
                pictures = list(media.frames.pictures)
                files.append(b"".join(pictures))
                detached.frames.sizes_bytes.extend(map(len, pictures))
                detached.frames.timestamps_s.extend(media.frames.timestamps_s)
                detached.frames.by_time, detached.frames.left_out = media.frames.by_time, media.frames.left_out
            detached.audio = media.audio
            for field in ("frame_sampling", "pruning"):
                if media.HasField(field):
                    getattr(detached, field).CopyFrom(getattr(media, field))
    return without, files


def file_pieces(files: Iterable[bytes | bytearray]) -> Iterator[bytes]:
    """The contents of the messages that bring detached files."""
    for file in files:
        for _, piece in pieces(memoryview(file)):
            yield bytes(piece)


async def received_pieces(requests: Requests, prompt: prompt_pb2.Prompt) -> AsyncIterator[tuple[str, bytes]]:
    """Pieces of the files that a prompt announces, each with the name of its media item, in order.

    requests: those after the prompt.
    Raises InvalidRequest for a file of no bytes, and for a request that is not the next piece.
    """
    for name, _, media in named_media(prompt):
        left = _announced_bytes(media)
        if media.WhichOneof("source") == "data_bytes" and left < 1:
            raise InvalidRequest(field=f"{name}.data_bytes", limit="at least 1", value=left)
        while left:
            request: EncodeRequest | PreprocessRequest | None = await anext(requests, None)
            piece = b"" if request is None else request.file.data
            most = min(left, MAX_PIECE_BYTES)
            if not 0 < len(piece) <= most:
                limit = f"followed by a file piece of 1 to {most} bytes"
                raise InvalidRequest(field=name, limit=limit, value=len(piece))
            left -= len(piece)
            yield name, piece


async def selections(requests: Requests, media: int) -> AsyncIterator[tuple[int, prompt_pb2.Select]]:
    """Indices of the selected media items, and the selections that name them, in their order, until the caller
    half-closes.

    requests: those after the prompt and its files. media: how many items the plan has.
    Only a select message selects. Half-closing must not, because a cancelled call looks half-closed for a moment.
    Raises InvalidRequest for an index outside the plan, one that was selected before, and a second prompt.
    """
    selected: set[int] = set()
    async for request in requests:
        if not request.HasField("select"):
            raise InvalidRequest(
                "after the prompt and the files that it announces, every request of a stream must be a select"
            )
        if request.select.all:
            indices = [index for index in range(media) if index not in selected]
        else:
            indices = [_checked(request.select.media_index, media, selected)]
        for index in indices:
            selected.add(index)
            yield index, request.select


def pruning_from(select: prompt_pb2.Select, pruning: ItemPruning, item: MediaPlan) -> ItemPruning:
    """The pruning of a selected item, from the selection's first slice on. Raises InvalidRequest."""
    first = select.first_slice
    if first and not (0 < first < item.grid.t and pruning.threshold is not None and not pruning.rate):
        limit = f"below the item's {item.grid.t} slices, 0 without a threshold alone"
        raise InvalidRequest(field="select.first_slice", limit=limit, value=first)
    if (size := len(select.reference)) and size != (fits := reference_bytes(item.grid) if first else 0):
        raise InvalidRequest(field="select.reference", limit=f"of {fits} bytes", value=f"{size} bytes")
    return replace(pruning, first_slice=first, reference=select.reference)


def _checked(index: int, media: int, selected: set[int]) -> int:
    if not 0 <= index < media:
        raise InvalidRequest(field="select.media_index", limit=f"below the plan's {media} media", value=index)
    if index in selected:
        text = f"{index} was already selected, each item can be selected once"
        raise InvalidRequest(text, field="select.media_index", value=index)
    return index
