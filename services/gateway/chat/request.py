"""The body of POST /v1/chat/completions: OpenAI's fields, vLLM's sampling and media fields, and `pruning`.

Each field is used or refused: one that is not known is an error that names it, and those of OpenAI that have no meaning
here are accepted at their neutral value only, because clients send it unasked.

Source: OpenAI's API reference of chat completions; vLLM's OpenAI-compatible server, "extra parameters".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from common.contract.retention import Pruning as Rate
from services.gateway.http.fields import Strict, parsed

Nothing: TypeAlias = None
EmptyList: TypeAlias = Annotated[list[Any], Field(max_length=0)]
EmptyObject: TypeAlias = Annotated[dict[str, Any], Field(max_length=0)]


class Pruning(Strict):
    """How the tokens of videos are pruned."""

    rate: float
    method: str = "evs"
    seed: int | None = None

    def parsed(self) -> Rate:
        return Rate(self.rate, self.method, self.seed or 0)


class FrameChoice(Strict):
    """`mm_processor_kwargs`: which frames are used, and at what size, in the names of transformers' processors."""

    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    max_pixels: int | None = None
    video_start: float | None = None
    video_end: float | None = None


class VideoReading(Strict):
    """`media_io_kwargs.video`: which frames are read, in vLLM's names. duration: seconds from the start."""

    fps: float | None = None
    num_frames: int | None = None
    frames_indices: list[int] | None = None
    duration: float | None = None


class MediaReading(Strict):
    video: VideoReading | None = None


class Location(Strict):
    """A URL: https, http or data. detail: OpenAI's level of detail of an image, which no model here has."""

    url: str
    detail: Literal["auto"] | None = None


class File(Strict):
    """A file: its bytes as a data: URL, or the id of an uploaded file."""

    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


class MediaOptions(Strict):
    """How media are pruned and read: of a part that holds them, or of all those of a request."""

    pruning: Pruning | None = None
    mm_processor_kwargs: FrameChoice | None = None
    media_io_kwargs: MediaReading | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImageURLPart(MediaOptions):
    type: Literal["image_url"]
    image_url: Location | str


class VideoURLPart(MediaOptions):
    type: Literal["video_url"]
    video_url: Location | str


class InputVideoPart(MediaOptions):
    type: Literal["input_video"]
    input_video: Location | str


class FilePart(MediaOptions):
    type: Literal["file"]
    file: File


MediaPart: TypeAlias = ImageURLPart | VideoURLPart | InputVideoPart | FilePart
AnyPart: TypeAlias = Annotated[TextPart | MediaPart, Field(discriminator="type")]


class ChatMessage(Strict):
    """A turn. The fields after `content` are those that clients echo of an answer, all empty here."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[AnyPart]
    refusal: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None
    tool_calls: EmptyList | None = None
    annotations: EmptyList | None = None
    reasoning_content: Nothing = None


class StreamOptions(Strict):
    include_usage: bool = False


class TextFormat(Strict):
    type: Literal["text"]


class ObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    """strict: accepted whatever it is, because every answer satisfies its schema."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat: TypeAlias = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class ChatRequest(MediaOptions):
    """The body. Ranges are checked by generation."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None

    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None

    # Of OpenAI's, at their neutral value.
    tools: EmptyList | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: EmptyList | None = None
    function_call: Literal["none"] | None = None
    logit_bias: EmptyObject | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    audio: Nothing = None
    prediction: Nothing = None
    reasoning_effort: Nothing = None
    verbosity: Nothing = None
    web_search_options: Nothing = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None


def parse(body: bytes | bytearray) -> ChatRequest:
    """Raises InvalidRequest, which names the first wrong field, for a body that is not a ChatRequest."""
    return parsed(ChatRequest, body)
