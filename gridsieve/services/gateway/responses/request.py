"""The body of POST /v1/responses: OpenAI's fields, and our fields for sampling frames and pruning.

Each field is used or refused, as in a chat request. Conversations and prompts are not kept, so that fields which name
one are refused. What clients echo of earlier answers and what they send unasked is accepted.

Source: OpenAI's API reference, "create a model response"; vLLM's names for `mm_processor_kwargs`, `media_io_kwargs`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, Tag

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.gateway.chat.request import (
    AudioPart,
    FunctionDefinition,
    FunctionName,
    JsonSchema,
    Location,
    MediaOptions,
    MomentsFormat,
    ObjectFormat,
    TextFormat,
    VideoOptions,
)
from gridsieve.services.gateway.http.fields import Strict, Whole, parsed, short

_STATEFUL = {
    "conversation": "conversations are not kept, send previous_response_id, or their items in input",
    "prompt": "prompts are not kept, send instructions and input",
    "background": "the answer is sent to the request that asks for it",
}

FORMAT = "text.format"

Summary: TypeAlias = Literal["auto", "concise", "detailed"]
Ignored: TypeAlias = Any
"""Of an earlier answer's item, echoed: also what OpenAI's Python client adds to it."""


class InputText(Strict):
    type: Literal["input_text"]
    text: str


class OutputText(Strict):
    type: Literal["output_text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None
    parsed: Ignored = None


class InputImage(MediaOptions):
    """detail: has no effect."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None


class InputFile(VideoOptions):
    """A video or an image: its bytes as a data: URL or base64, the id of an uploaded file, or a URL."""

    type: Literal["input_file"]
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None
    filename: str | None = None
    detail: Literal["auto", "low", "high"] | None = None


class InputVideo(VideoOptions):
    """A video by URL, in Open Responses' field or in that of a chat request, or the id of an uploaded file."""

    type: Literal["input_video"]
    video_url: Location | str | None = None
    input_video: Location | str | None = None
    file_id: str | None = None


MediaPart: TypeAlias = InputImage | InputVideo | InputFile
AnyPart: TypeAlias = Annotated[InputText | OutputText | MediaPart | AudioPart, Field(discriminator="type")]


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[AnyPart]
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class CallItem(Strict):
    """A call of a function, which the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    parsed_arguments: Ignored = None
    id: Ignored = None
    status: Ignored = None


class OutputItem(Strict):
    """What a function returned. name: of the function; unset: that of the call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[AnyPart]
    name: str | None = None
    id: Ignored = None
    status: Ignored = None


class ReasoningItem(Strict):
    """What the model thought, as an answer had it: content, or a summary; one with neither is ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning"]
    content: Ignored = None
    summary: Ignored = None
    id: Ignored = None

    @property
    def text(self) -> str:
        return _texts(self.content, "reasoning_text") or _texts(self.summary, "summary_text")


def _texts(parts: Any, kind: str) -> str:
    own = [each for each in parts if isinstance(each, dict)] if isinstance(parts, list) else []
    texts = [each.get("text") for each in own if each.get("type") == kind]
    return "".join(text for text in texts if isinstance(text, str))


class ItemReference(Strict):
    """An item of a stored answer."""

    type: Literal["item_reference"]
    id: str


def _kind_of(item: Any) -> str | None:
    return item.get("type", "message") if isinstance(item, dict) else None


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind_of),
]


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class TextOptions(Strict):
    """verbosity: has no effect."""

    format: Annotated[TextFormat | ObjectFormat | SchemaFormat | MomentsFormat, Field(discriminator="type")] | None = (
        None
    )
    verbosity: Literal["low", "medium", "high"] | None = None


class FunctionTool(FunctionDefinition):
    type: Literal["function"]


class NamedTool(FunctionName):
    type: Literal["function"]


class Reasoning(Strict):
    """summary, by its old name generate_summary: the thought is told as its own summary. effort: has no effect."""

    effort: str | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class StreamOptions(Strict):
    include_obfuscation: bool | None = None


class ResponsesRequest(MediaOptions):
    """The body. Ranges are checked by generation."""

    input: Annotated[list[Item], Field(min_length=1)] | str
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    model: str | None = None
    stream: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    max_output_tokens: Whole | None = None
    max_thinking_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: Whole | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    service_tier: Literal["auto", "default", "flex"] | None = None

    # Those without effect, or at the value that has none.
    reasoning: Reasoning | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["disabled"] | None = None

    conversation: Any = None
    prompt: Any = None
    background: Any = None

    @property
    def moments(self) -> MomentsFormat | None:
        """The format of an answer in moments; None: it is in another one."""
        form = self.text.format if self.text else None
        return form if isinstance(form, MomentsFormat) else None


def parse(body: bytes | bytearray) -> ResponsesRequest:
    """Raises InvalidRequest, which names the first wrong field, for a body that is not a ResponsesRequest."""
    request = parsed(ResponsesRequest, body)
    for name, reason in _STATEFUL.items():
        value = getattr(request, name)
        if value is not None and value is not False:
            raise InvalidRequest(f"must not be set, got {short(value)}: {reason}", field=name)
    return request
