"""The body of POST /v1/chat/completions: OpenAI's fields, vLLM's sampling and media fields, and `pruning`.

Each field is used or refused: one that is not known is an error that names it. Two groups at the end of their classes
are neither: fields that change no answer are accepted whatever they say (`Unused`), and those that have no meaning here
at their neutral value only, because clients send it unasked.

Source: OpenAI's API reference of chat completions; vLLM's OpenAI-compatible server, "extra parameters".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from gridsieve.client.prompt import Embeds, Pruning
from gridsieve.common.contract.data_urls import DataUrl
from gridsieve.common.contract.errors import InvalidRequest, within
from gridsieve.common.contract.plan import Grid
from gridsieve.services.gateway.http.fields import Strict, Whole, parsed

Nothing: TypeAlias = None
EmptyList: TypeAlias = Annotated[list[Any], Field(max_length=0)]
EmptyObject: TypeAlias = Annotated[dict[str, Any], Field(max_length=0)]
Unused: TypeAlias = str | None
Zero: TypeAlias = Annotated[Whole, Field(ge=0, le=0)]
One: TypeAlias = Annotated[float, Field(ge=1, le=1)]
Int32: TypeAlias = Annotated[int, Field(lt=2**31)]


def _single(value: Any) -> Any:
    """The value of a list with one, as transformers takes one for each video."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


class PruningFields(Strict):
    """How the tokens of videos are pruned."""

    rate: float | None = None
    method: str | None = None
    seed: int | None = None
    threshold: float | None = None

    def parsed(self) -> Pruning:
        """Raises InvalidRequest as the client's."""
        return Pruning(self.rate, self.method, self.seed, self.threshold)


class FrameChoice(Strict):
    """`mm_processor_kwargs`: which frames are used, and at what size, in the names of transformers' processors; `mode`
    is FrameSampling's. use_audio_in_video: whether the sound of videos is heard, too."""

    fps: Annotated[float | None, BeforeValidator(_single)] = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    max_pixels: int | None = None
    video_start: float | None = None
    video_end: float | None = None
    max_slice_nums: int | None = None
    mode: str | None = None
    use_audio_in_video: bool | None = None

    do_sample_frames: Literal[True] | None = None


class VideoReading(Strict):
    """`media_io_kwargs.video`: which frames are read, in vLLM's names and meaning. duration: seconds from the start."""

    fps: float | None = None
    num_frames: int | None = None
    frames_indices: list[Int32] | None = None
    duration: float | None = None


class MediaReading(Strict):
    video: VideoReading | None = None


class Location(Strict):
    """A URL: https, http, data or file. detail: OpenAI's level of detail of an image; max_pixels is what sizes it."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class File(Strict):
    """A file: its bytes as a data: URL, or the id of an uploaded file."""

    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


class TokenGrid(Strict):
    """The tokens of an item: temporal slices, rows and columns."""

    t: Int32
    h: Int32
    w: Int32


class EmbedsFields(Strict):
    """The vision tower's output for an image or a video: gRPC's MediaEmbeds, whose tensor is its bytes, little-endian
    and in C order, in base64."""

    data: str
    dtype: Literal["float32", "float16", "bfloat16"]
    shape: Annotated[list[Int32], Field(min_length=2, max_length=3)]
    grid: TokenGrid
    tile_columns: Int32 | None = None
    seconds_per_grid: float | None = None
    timestamps_s: list[float] | None = None

    def parsed(self) -> Embeds:
        """Raises InvalidRequest for data that are not base64, and a grid without tokens or of too many."""
        with within("data"):
            data = DataUrl("", is_base64=True, body=self.data.encode()).data
        try:
            grid = Grid(self.grid.t, self.grid.h, self.grid.w)
        except ValueError as error:
            raise InvalidRequest(f"is invalid: {error}", field="grid") from error
        return Embeds(
            data,
            grid,
            dtype=self.dtype,
            shape=tuple(self.shape),
            seconds_per_slice=self.seconds_per_grid,
            timestamps_s=tuple(self.timestamps_s or ()),
            tile_columns=self.tile_columns or 0,
        )


class Pruned(Strict):
    pruning: PruningFields | None = None


class MediaOptions(Pruned):
    """How media are pruned and read: of a part that holds them, or of all those of a request."""

    mm_processor_kwargs: FrameChoice | None = None
    media_io_kwargs: MediaReading | None = None


class VideoOptions(MediaOptions):
    """Ours: audio, whether the sound of the video is heard, too; before use_audio_in_video of mm_processor_kwargs."""

    audio: bool | None = None


class Marked(Strict):
    """What clients mark parts with; it has no effect."""

    uuid: Unused = None
    cache_control: dict[str, Any] | None = None


class TextPart(Marked):
    type: Literal["text"]
    text: str


class ImageURLPart(MediaOptions, Marked):
    type: Literal["image_url"]
    image_url: Location | str


class VideoURLPart(VideoOptions, Marked):
    type: Literal["video_url"]
    video_url: Location | str


class InputVideoPart(VideoOptions, Marked):
    type: Literal["input_video"]
    input_video: Location | str


class FilePart(VideoOptions, Marked):
    type: Literal["file"]
    file: File


class SoundFile(Strict):
    """OpenAI's sound: a file's bytes in base64. format: has no effect, the bytes decide."""

    data: str
    format: Unused = None


class SoundChoice(Strict):
    """`mm_processor_kwargs` of a sound: the part that is heard, in the names of a video's, in seconds."""

    video_start: float | None = None
    video_end: float | None = None


class SoundPart(Marked):
    mm_processor_kwargs: SoundChoice | None = None


class InputAudioPart(SoundPart):
    type: Literal["input_audio"]
    input_audio: SoundFile


class AudioURLPart(SoundPart):
    """vLLM's."""

    type: Literal["audio_url"]
    audio_url: Location | str


class ImageEmbedsPart(Pruned, Marked):
    type: Literal["image_embeds"]
    image_embeds: EmbedsFields


class VideoEmbedsPart(Pruned, Marked):
    type: Literal["video_embeds"]
    video_embeds: EmbedsFields


MediaPart: TypeAlias = ImageURLPart | VideoURLPart | InputVideoPart | FilePart
EmbedsPart: TypeAlias = ImageEmbedsPart | VideoEmbedsPart
AudioPart: TypeAlias = InputAudioPart | AudioURLPart
AnyPart: TypeAlias = Annotated[TextPart | MediaPart | EmbedsPart | AudioPart, Field(discriminator="type")]


class CalledFunction(Strict):
    """arguments: a JSON object as text."""

    name: str
    arguments: str


class AssistantCall(Strict):
    """A tool call of an earlier turn, as the answer had it."""

    id: str
    type: Literal["function"]
    function: CalledFunction

    index: int | None = None


class ChatMessage(Strict):
    """A turn. content: unset where the model only called tools. reasoning_content, reasoning: two names of an answer's
    thought. Clients send the last four fields of an answer back; they must be empty. `name` is used for tools alone.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[AnyPart] | None = None
    tool_calls: list[AssistantCall] | None = None
    tool_call_id: str | None = None
    name: Unused = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    refusal: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None
    annotations: EmptyList | None = None


class StreamOptions(Strict):
    """continuous_usage_stats: vLLM's, every chunk has the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    include_obfuscation: bool | None = None


class FunctionDefinition(Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    """The one tool that must be called."""

    type: Literal["function"]
    function: FunctionName


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


class MomentsFormat(Strict):
    """Ours: moments of the request's videos. captions: also as the text of a file, of one video."""

    type: Literal["moments"]
    grain_s: float | None = None
    captions: Literal["vtt", "srt"] | None = None


class StructuredOutputs(Strict):
    """vLLM's other name of `response_format`. json: a schema, or its text."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None

    regex: Nothing = None
    choice: Nothing = None
    grammar: Nothing = None
    structural_tag: Nothing = None
    whitespace_pattern: Nothing = None
    disable_fallback: Literal[False] | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None


ResponseFormat: TypeAlias = Annotated[
    TextFormat | ObjectFormat | SchemaFormat | MomentsFormat, Field(discriminator="type")
]


class ChatRequest(MediaOptions):
    """The body. Ranges are checked by generation."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None

    max_completion_tokens: Whole | None = None
    max_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Whole | None = None
    n: Whole | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = None
    ignore_eos: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    min_tokens: Whole | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    max_thinking_tokens: Whole | None = None
    thinking_token_budget: Whole | None = None
    cache_salt: str | None = None
    service_tier: Literal["auto", "default", "flex"] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    attention: bool | None = None

    prompt_cache_key: Unused = None
    reasoning_effort: Unused = None
    verbosity: Unused = None

    functions: EmptyList | None = None
    function_call: Literal["none"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    audio: Nothing = None
    prediction: Nothing = None
    web_search_options: Nothing = None
    store: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    add_generation_prompt: Literal[True] | None = None
    length_penalty: One | None = None
    priority: Zero | None = None
    echo: Literal[False] | None = None

    # vLLM's.
    best_of: One | None = None
    use_beam_search: Literal[False] | None = None
    early_stopping: Literal[False] | None = None
    prompt_logprobs: Nothing = None
    truncate_prompt_tokens: Nothing = None
    allowed_token_ids: Nothing = None
    include_stop_str_in_output: Literal[False] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    add_special_tokens: Literal[False] | None = None
    continue_final_message: Literal[False] | None = None
    include_reasoning: Literal[True] | None = None
    chat_template: Nothing = None
    documents: EmptyList | None = None
    logits_processors: EmptyList | None = None
    return_tokens_as_token_ids: Literal[False] | None = None
    return_token_ids: Literal[False] | None = None
    request_id: Nothing = None
    kv_transfer_params: Nothing = None
    vllm_xargs: EmptyObject | None = None
    guided_json: Nothing = None
    guided_regex: Nothing = None
    guided_choice: Nothing = None
    guided_grammar: Nothing = None
    guided_decoding_backend: Nothing = None
    guided_whitespace_pattern: Nothing = None
    structural_tag: Nothing = None


def parse(body: bytes | bytearray) -> ChatRequest:
    """Raises InvalidRequest, which names the first wrong field, for a body that is not a ChatRequest."""
    return parsed(ChatRequest, body)
