"""How much a prompt may hold, which each service checks before it walks through one: the largest message is 20 MiB.

What its fields may say is checked where they are read.
"""

from __future__ import annotations

from common.contract.errors import InvalidRequest
from common.contract.wire import MAX_MEDIA, named_media
from framesieve.v1 import prompt_pb2

# Messages and parts together: whoever walks through them holds up everybody else.
MAX_PARTS = 2**14
# A tokenizer takes a second for each MiB.
MAX_TEXT_BYTES = 4 * 2**20
MAX_INLINE_BYTES = 16 * 2**20


def check_prompt(prompt: prompt_pb2.Prompt) -> None:
    """Raises InvalidRequest for more parts, media, inline media or text than a prompt may hold."""
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
    """Raises InvalidRequest for more media, files and embeddings together, than a prompt may carry."""
    _check("bytes of inline media", size_bytes, MAX_INLINE_BYTES, "; larger files come by path or URL")


def _check(what: str, count: int, limit: int, remedy: str = "") -> None:
    if count > limit:
        raise InvalidRequest(f"prompt.messages hold {count} {what}, at most {limit} are allowed in sum{remedy}")
