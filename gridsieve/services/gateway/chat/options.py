"""The options of a request for the client, from the fields of its body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from gridsieve.client.prompt import Message, Options, Video
from gridsieve.client.tools import Tool
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.gateway.chat.request import (
    ChatRequest,
    FunctionDefinition,
    FunctionName,
    MomentsFormat,
    NamedTool,
    ObjectFormat,
    PruningFields,
    SchemaFormat,
)

_TOKEN_DIGITS = 10

_SAME_NAMES = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "n"),
    *("stop_token_ids", "ignore_eos", "logprobs", "top_logprobs", "bad_words", "parallel_tool_calls", "cache_salt"),
    "attention",
)


def options_of(request: ChatRequest) -> tuple[Options, dict[str, str]]:
    """The options, and the body's names of fields of Sampling, where they differ. Raises InvalidRequest for fields that
    contradict one another."""
    given: Mapping[str, object] = {name: getattr(request, name) for name in _SAME_NAMES}
    options = cast("Options", {name: value for name, value in given.items() if value is not None})
    most, older = request.max_completion_tokens, request.max_tokens
    if older is not None and most not in (None, older):
        text = f"must not differ from max_completion_tokens, got {older} and {most}"
        raise InvalidRequest(text, field="max_tokens")
    options["max_new_tokens"] = older if most is None else most
    options["min_new_tokens"] = request.min_tokens
    names = {
        "max_new_tokens": "max_completion_tokens" if older is None else "max_tokens",
        "min_new_tokens": "min_tokens",
    }
    thinking, other = request.max_thinking_tokens, request.thinking_token_budget
    if other is not None and thinking not in (None, other):
        text = f"must not differ from max_thinking_tokens, got {other} and {thinking}"
        raise InvalidRequest(text, field="thinking_token_budget")
    options["max_thinking_tokens"] = other if thinking is None else thinking
    if thinking is None:
        names["max_thinking_tokens"] = "thinking_token_budget"
    options["yields"] = request.service_tier == "flex"
    if request.seed != -1:  # vLLM's spelling of "any"
        options["seed"] = request.seed
    if request.logit_bias:
        options["logit_bias"] = {_token_id(token): bias for token, bias in request.logit_bias.items()}
    options["top_k"] = 0 if request.top_k == -1 else request.top_k  # vLLM's spelling of "all"
    options["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
    options.update(pruning_of(request.pruning))
    options["template_options"] = template_options_of(request.chat_template_kwargs)
    names |= {"json_schema": _set_structure(options, request), "moments": "response_format"}
    choice = request.tool_choice
    named = choice.function if isinstance(choice, NamedTool) else choice
    set_tools(options, [each.function for each in request.tools or ()], named, "tool_choice.function.name")
    return options, names


def pruning_of(fields: PruningFields | None) -> Options:
    """The pruning of videos that do not say their own."""
    if fields is None:
        return Options()
    pruning = fields.parsed()
    return Options(
        pruning_rate=pruning.rate,
        pruning_method=pruning.method,
        pruning_seed=pruning.seed,
        pruning_threshold=pruning.threshold,
    )


def template_options_of(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Variables of the chat template, without the one that it always gets and some clients send."""
    return {name: value for name, value in (given or {}).items() if (name, value) != ("add_generation_prompt", True)}


def set_moments(options: Options, form: MomentsFormat) -> None:
    options["moments"] = True if form.grain_s is None else form.grain_s


def check_captions(form: MomentsFormat, messages: Sequence[Message], name: str) -> None:
    """name: of the format. Raises InvalidRequest for captions of several videos, or of none."""
    videos = sum(isinstance(part, Video) for message in messages for part in message.parts)
    if form.captions and videos != 1:
        raise InvalidRequest(field=f"{name}.captions", limit="of one video", value=f"{videos} videos")


def _set_structure(options: Options, request: ChatRequest) -> str:
    """The field that says it."""
    name, other = "json_schema", request.structured_outputs
    match request.response_format:
        case ObjectFormat():
            options["json_object"], name = True, "response_format"
        case SchemaFormat(json_schema=given_schema):
            options["json_schema"], name = given_schema.schema_, "response_format.json_schema.schema"
        case MomentsFormat() as form:
            set_moments(options, form)
    if other is None or (other.json_ is None and not other.json_object):
        return name
    if options.keys() & {"json_object", "json_schema", "moments"}:
        text = "must not be set with response_format: it is another name of it"
        raise InvalidRequest(text, field="structured_outputs")
    if other.json_object and other.json_ is not None:
        text = "must not be set together with structured_outputs.json"
        raise InvalidRequest(text, field="structured_outputs.json_object")
    if other.json_object:
        options["json_object"] = True
        return "structured_outputs.json_object"
    options["json_schema"] = other.json_
    return "structured_outputs.json"


def set_tools(
    options: Options,
    functions: Sequence[FunctionDefinition],
    choice: Literal["none", "auto", "required"] | FunctionName | None,
    name: str,
) -> None:
    """name: of the field of a function that must be called. Raises InvalidRequest if that is none of the tools."""
    tools = [Tool(each.name, each.description, each.parameters, bool(each.strict)) for each in functions]
    options["tools"] = tools
    if not isinstance(choice, FunctionName):
        options["tool_choice"] = choice
        return
    chosen = next((tool for tool in tools if tool.name == choice.name), None)
    if chosen is None:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise InvalidRequest(field=name, limit=f"one of the tools ({known})", value=choice.name)
    options["tool_choice"] = chosen


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < _TOKEN_DIGITS):
        raise InvalidRequest(f"must have token ids as its names, got {text[:40]!r}", field="logit_bias")
    return int(text)
