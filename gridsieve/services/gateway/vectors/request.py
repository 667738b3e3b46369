"""The bodies of POST /v1/embeddings, /v1/rerank and /v1/score: OpenAI's, Cohere's and vLLM's fields, and `pruning`.

Each field is used or refused, as in a chat request. What would change a vector or a score is refused: token ids in
place of text, truncation, other poolings.

Source: OpenAI's API reference of embeddings; Cohere's of rerank; vLLM's OpenAI-compatible server, pooling models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.gateway.chat.request import (
    AnyPart,
    ChatMessage,
    Int32,
    MediaOptions,
    Nothing,
    TextPart,
    Unused,
    Zero,
)
from gridsieve.services.gateway.http.fields import Strict

_MAX_TEXTS = 2048
"""Of a body, as OpenAI has it."""


class Parts(Strict):
    """vLLM's query or document of several parts."""

    content: Annotated[list[AnyPart], Field(min_length=1)]


class TextDocument(Strict):
    """Cohere's document."""

    text: str


Content: TypeAlias = str | Parts | TextDocument
Contents: TypeAlias = Annotated[list[Content], Field(min_length=1, max_length=_MAX_TEXTS)]


class ReadRequest(MediaOptions):
    """instruction: what the vector or the score is for."""

    model: str | None = None
    instruction: str | None = None
    cache_salt: str | None = None

    user: Unused = None
    priority: Zero | None = None
    truncate_prompt_tokens: Nothing = None
    use_activation: Literal[True] | None = None


class EmbeddingsRequest(ReadRequest):
    """input: texts; messages: vLLM's, one conversation. continue_final_message: whose last message is empty and the
    assistant's, which is what the template's generation prompt writes."""

    input: str | Annotated[list[str], Field(min_length=1, max_length=_MAX_TEXTS)] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int32 | None = None
    continue_final_message: bool | None = None

    add_generation_prompt: Literal[True] | None = None
    add_special_tokens: Literal[True] | None = None

    @property
    def conversation(self) -> Sequence[ChatMessage]:
        """The messages before the generation prompt. Raises InvalidRequest for others than those above."""
        messages = self.messages or []
        if not self.continue_final_message:
            return messages
        before, last = messages[:-1], messages[-1]
        parts = [TextPart(type="text", text=last.content)] if isinstance(last.content, str) else last.content or ()
        is_empty = all(isinstance(part, TextPart) and not part.text for part in parts)
        if last.role != "assistant" or not is_empty or not before:
            text = "must be false, unless the last of several messages is empty and the assistant's"
            raise InvalidRequest(text, field="continue_final_message")
        return before


class RerankRequest(ReadRequest):
    query: Content
    documents: Contents
    top_n: Annotated[int | None, Field(ge=1)] = None
    return_documents: bool | None = None


class ScoreRequest(ReadRequest):
    """One query for all documents, or one for each; in older and newer names."""

    text_1: Content | Contents | None = None
    text_2: Content | Contents | None = None
    queries: Content | Contents | None = None
    documents: Content | Contents | None = None

    @property
    def pairs(self) -> list[tuple[tuple[str, Content], tuple[str, Content]]]:
        """Each query and its document, with their names. Raises InvalidRequest for numbers that do not match."""
        first, second = ("text_1", "text_2") if self.text_1 is not None else ("queries", "documents")
        queries, documents = (_named(name, getattr(self, name)) for name in (first, second))
        unused = {"text_1", "text_2", "queries", "documents"} - {first, second}
        if given := sorted(name for name in unused if getattr(self, name) is not None):
            raise InvalidRequest(f"must not be set with {first}", field=given[0])
        if len(queries) not in (1, len(documents)):
            raise InvalidRequest(field=first, limit=f"one, or as many as {second}", value=len(queries))
        return list(zip(queries * (len(documents) if len(queries) == 1 else 1), documents, strict=True))


def _named(name: str, content: Content | Contents | None) -> list[tuple[str, Content]]:
    if content is None:
        raise InvalidRequest(field=name, limit="set")
    if isinstance(content, list):
        return [(f"{name}[{number}]", each) for number, each in enumerate(content)]
    return [(name, content)]
