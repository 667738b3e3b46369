"""What the requests of all three services have in common: limits of a prompt, and the selection of media items.

Each service checks these limits before it iterates over a prompt. The values of single fields are checked where they
are read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from common.contract.errors import InvalidRequest
from common.contract.wire import MAX_MEDIA, named_media
from framesieve.v1 import prompt_pb2
from framesieve.v1.encoder_pb2 import EncodeRequest
from framesieve.v1.preprocessing_pb2 import PreprocessRequest

# Messages and parts together. Loops over them block the event loop and thereby all other requests.
MAX_PARTS = 2**14
# A tokenizer needs about a second per MiB.
MAX_TEXT_BYTES = 4 * 2**20
MAX_INLINE_BYTES = 16 * 2**20


def check_prompt(prompt: prompt_pb2.Prompt) -> None:
    """Raises InvalidRequest for a prompt with too many parts, media, bytes of inline media or bytes of text."""
    parts = len(prompt.messages)
    for message in prompt.messages[: MAX_PARTS + 1]:
        parts += len(message.parts)
    _check("messages and parts", parts, MAX_PARTS)
    media = [item for _, _, item in named_media(prompt)]
    _check("media", len(media), MAX_MEDIA)
    check_inline_bytes(sum(len(item.data) + len(item.embeds.tensor.data) for item in media))
    text = sum(len(part.text.encode()) for message in prompt.messages for part in message.parts)
    _check("bytes of text", text, MAX_TEXT_BYTES)


def check_inline_bytes(size_bytes: int) -> None:
    """Raises InvalidRequest for too many bytes of inline media, files and embeddings together."""
    _check("bytes of inline media", size_bytes, MAX_INLINE_BYTES, "; send larger files by path or URL")


def _check(what: str, count: int, limit: int, remedy: str = "") -> None:
    if count > limit:
        raise InvalidRequest(f"prompt.messages hold {count} {what}, at most {limit} are allowed in sum{remedy}")


async def selections(
    requests: AsyncIterator[PreprocessRequest] | AsyncIterator[EncodeRequest], media: int
) -> AsyncIterator[int]:
    """Indices of the selected media items, in the order of selection, until the caller half-closes.

    requests: those after the prompt. media: how many items the plan has.
    Only a select message selects. Half-closing must not, because a cancelled call looks half-closed for a moment.
    Raises InvalidRequest for an index outside the plan, one that was selected before, and a second prompt.
    """
    selected: set[int] = set()
    async for request in requests:
        if not request.HasField("select"):
            raise InvalidRequest("after the prompt, every request of a stream must be a select")
        if request.select.all:
            indices = [index for index in range(media) if index not in selected]
        else:
            indices = [_checked(request.select.media_index, media, selected)]
        for index in indices:
            selected.add(index)
            yield index


def _checked(index: int, media: int, selected: set[int]) -> int:
    if not 0 <= index < media:
        raise InvalidRequest(f"select.media_index must be below the plan's {media} media, got {index}")
    if index in selected:
        raise InvalidRequest(f"select.media_index {index} was selected before, each is sent once")
    return index
