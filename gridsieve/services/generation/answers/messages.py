"""Conversion between protobuf messages and the engine's values: sampling requests in, an answer's events out."""

from __future__ import annotations

from typing import Any

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.requests import check_tools
from gridsieve.services.generation.answers.text import Ended, Said, Told
from gridsieve.services.generation.request.request import Attended, FinishReason
from gridsieve.services.generation.sampling.detokenizer import REPLACEMENT, Tokenizer
from gridsieve.services.generation.sampling.moments import MomentsFormat
from gridsieve.services.generation.sampling.params import SamplingRequest, check_counts
from gridsieve.services.generation.sampling.structured import ANY_OBJECT, MAX_SCHEMA_CHARACTERS
from gridsieve.services.generation.sampling.token_bytes import token_bytes
from gridsieve.services.generation.sampling.tool_calls import Tool, ToolUse
from gridsieve.services.generation.stage_clock import StageClock
from gridsieve.v1 import encoder_pb2, generation_pb2

_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.TOOL_CALLS: generation_pb2.FINISH_REASON_TOOL_CALLS,
}
_NS = 1e-9


def sampling_request(request: generation_pb2.GenerateRequest) -> SamplingRequest:
    """Raises InvalidRequest for a value outside its range."""
    message = request.sampling
    # Before copying what may be millions.
    check_counts(len(message.stop), len(message.stop_token_ids), len(message.logit_bias), len(message.bad_words))
    check_tools(request.prompt)
    given: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    given |= {name: tuple(getattr(message, name)) for name in ("stop", "stop_token_ids", "bad_words")}
    given["logit_bias"] = dict(message.logit_bias)
    if given.pop("json_object", False):
        given["json_schema"] = ANY_OBJECT
    if message.HasField("moments"):
        given["moments"] = MomentsFormat(message.moments.grain_s if message.moments.HasField("grain_s") else None)
    return SamplingRequest(**given, tool_use=_tool_use(request))


def _tool_use(request: generation_pb2.GenerateRequest) -> ToolUse | None:
    """None where the answer cannot call tools. Raises InvalidRequest for a choice that contradicts the tools."""
    choice, tools = request.tool_choice, request.prompt.tools
    required = choice.mode == generation_pb2.TOOL_CHOICE_MODE_REQUIRED
    if choice.name and not required:
        raise InvalidRequest(field="tool_choice.name", limit="empty unless tools must be called", value=choice.name)
    if choice.mode == generation_pb2.TOOL_CHOICE_MODE_NONE or not tools:
        if required:
            raise InvalidRequest("must not be required without tools in the prompt", field="tool_choice.mode")
        return None
    callable_tools = tuple(
        Tool(tool.name, tool.parameters, tool.strict, place)
        for place, tool in enumerate(tools)
        if choice.name in ("", tool.name)
    )
    if not callable_tools:
        raise InvalidRequest(field="tool_choice.name", limit="one of the prompt's tools", value=choice.name)
    for index, tool in enumerate(tools):
        if (size := len(tool.parameters)) > MAX_SCHEMA_CHARACTERS:
            limit = f"at most {MAX_SCHEMA_CHARACTERS} characters"
            raise InvalidRequest(field=f"prompt.tools[{index}].parameters", limit=limit, value=size)
    return ToolUse(callable_tools, required, choice.single_call)


def response_of(
    told: Told, usage: generation_pb2.Usage, clock: StageClock, tokenizer: Tokenizer
) -> generation_pb2.GenerateResponse:
    """usage: as `finished_message` takes it."""
    match told:
        case Said():
            return generation_pb2.GenerateResponse(delta=delta_message(told, tokenizer))
        case Ended():
            finished = finished_message(told, usage, clock)
            if told.attended:
                finished.attention.CopyFrom(attention_message(told.attended, tokenizer))
            return generation_pb2.GenerateResponse(finished=finished)
    return generation_pb2.GenerateResponse(
        progress=encoder_pb2.MediaProgress(
            media_index=told.media_index,
            decoded_slices=told.decoded_slices,
            encoded_slices=told.encoded_slices,
        )
    )


def delta_message(said: Said, tokenizer: Tokenizer) -> generation_pb2.Delta:
    delta, calls = said.delta, said.calls
    if not delta.logprobs and not calls:
        return generation_pb2.Delta(
            choice_index=said.index, text=delta.text, token_ids=delta.token_ids, thought=said.thought
        )
    named = {one for top in delta.top_logprobs for one, _ in top}.union(delta.token_ids) if delta.logprobs else ()
    texts = {one: tokenizer.decode([one], skip_special_tokens=False) for one in named}
    return generation_pb2.Delta(
        choice_index=said.index,
        text=delta.text,
        thought=said.thought,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs,
        top_logprobs=[
            generation_pb2.TopLogprobs(token_ids=[one for one, _ in top], logprobs=[value for _, value in top])
            for top in delta.top_logprobs
        ],
        token_texts=texts,
        token_bytes={one: token_bytes(tokenizer, one, text) for one, text in texts.items() if REPLACEMENT in text},
        tool_calls=[
            generation_pb2.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
            for call in calls
        ],
    )


def attention_message(attended: Attended, tokenizer: Tokenizer) -> generation_pb2.Attention:
    message = generation_pb2.Attention(
        text_share=1 - attended.weights.sum(),
        tokens=[tokenizer.decode([one], skip_special_tokens=False) for one in attended.token_ids],
    )
    end = 0
    for index, kept in enumerate(attended.kept):
        first, end = end, end + kept.size
        rows = attended.token_weights
        message.media.add(
            kept=kept,
            weights=attended.weights[first:end],
            token_shares=attended.token_shares[:, index],
            token_weights=() if rows is None else rows[:, first:end].reshape(-1),
        )
    return message


def finished_message(ended: Ended, usage: generation_pb2.Usage, clock: StageClock) -> generation_pb2.Finished:
    """usage: of the prompt, to which that of the answer is added."""
    finished = ended.finished
    usage.completion_tokens = finished.completion_tokens
    usage.draft_tokens = finished.draft_tokens
    usage.accepted_draft_tokens = finished.accepted_draft_tokens
    usage.cached_prompt_tokens = ended.cached_tokens
    usage.thought_tokens = ended.thought_tokens
    timings = generation_pb2.Timings(
        time_to_first_token_s=clock.first_token_ns * _NS,
        generate_s=clock.generate_ns * _NS,
        **{f"{stage.name.lower()}_s": duration_ns * _NS for stage, duration_ns in clock.stages_ns().items()},
    )
    return generation_pb2.Finished(
        choice_index=ended.index, reason=_REASONS[finished.reason], usage=usage, timings=timings
    )
