"""The options of a request for the client, from the fields of its body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gridsieve.client.prompt import Options
from gridsieve.client.tools import Tool
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.gateway.chat.names import FieldNames
from gridsieve.services.gateway.chat.request import ChatRequest, MediaOptions, NamedTool, ObjectFormat, SchemaFormat

_TOKEN_DIGITS = 10

_SAME_NAMES = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "n"),
    *("stop_token_ids", "ignore_eos", "logprobs", "top_logprobs", "bad_words", "parallel_tool_calls", "cache_salt"),
)


def options_of(request: ChatRequest, names: FieldNames) -> Options:
    """names: gets those that differ. Raises InvalidRequest for fields that contradict one another."""
    options = Options()
    given: Mapping[str, object] = {name: getattr(request, name) for name in _SAME_NAMES}
    options.update({name: value for name, value in given.items() if value is not None})  # type: ignore[typeddict-item]
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        text = f"must not differ from max_completion_tokens, got {request.max_tokens} and "
        raise InvalidRequest(f"{text}{request.max_completion_tokens}", field="max_tokens")
    options["max_new_tokens"] = (
        request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    )
    names.options["max_new_tokens"] = "max_completion_tokens" if request.max_tokens is None else "max_tokens"
    if request.min_tokens is not None:
        options["min_new_tokens"] = request.min_tokens
        names.options["min_new_tokens"] = "min_tokens"
    if request.seed is not None and request.seed != -1:  # vLLM's spelling of "any"
        options["seed"] = request.seed
    if request.logit_bias:
        options["logit_bias"] = {_token_id(token): bias for token, bias in request.logit_bias.items()}
    if request.top_k is not None:
        options["top_k"] = 0 if request.top_k == -1 else request.top_k  # vLLM's spelling of "all"
    if request.stop is not None:
        options["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
    options.update(pruning_of(request))
    options["template_options"] = template_options_of(request.chat_template_kwargs)
    _set_structure(options, request, names)
    _set_tools(options, request)
    return options


def pruning_of(request: MediaOptions) -> Options:
    """The pruning of videos that do not say their own."""
    if request.pruning is None:
        return Options()
    pruning = request.pruning.parsed()
    return Options(
        pruning_rate=pruning.rate,
        pruning_method=pruning.method,
        pruning_seed=pruning.seed,
        pruning_threshold=pruning.threshold,
    )


def template_options_of(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Variables of the chat template, without the one that it always gets and some clients send."""
    return {name: value for name, value in (given or {}).items() if (name, value) != ("add_generation_prompt", True)}


def _set_structure(options: Options, request: ChatRequest, names: FieldNames) -> None:
    other = request.structured_outputs
    match request.response_format:
        case ObjectFormat():
            options["json_object"] = True
            names.options["json_schema"] = "response_format"
        case SchemaFormat(json_schema=given_schema):
            options["json_schema"] = given_schema.schema_
            names.options["json_schema"] = "response_format.json_schema.schema"
    if other is None or (other.json_ is None and not other.json_object):
        return
    if "json_object" in options or "json_schema" in options:
        text = "must not be set with response_format: it is another name of it"
        raise InvalidRequest(text, field="structured_outputs")
    if other.json_object and other.json_ is not None:
        text = "must not be set together with structured_outputs.json"
        raise InvalidRequest(text, field="structured_outputs.json_object")
    if other.json_object:
        options["json_object"] = True
        names.options["json_schema"] = "structured_outputs.json_object"
    else:
        options["json_schema"] = other.json_
        names.options["json_schema"] = "structured_outputs.json"


def _set_tools(options: Options, request: ChatRequest) -> None:
    tools = [
        Tool(each.function.name, each.function.description, each.function.parameters, bool(each.function.strict))
        for each in request.tools or ()
    ]
    if tools:
        options["tools"] = tools
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        named = next((tool for tool in tools if tool.name == choice.function.name), None)
        if named is None:
            name = choice.function.name
            raise InvalidRequest(field="tool_choice.function.name", limit="one of the tools", value=name)
        options["tool_choice"] = named
    elif choice is not None:
        options["tool_choice"] = choice


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < _TOKEN_DIGITS):
        raise InvalidRequest(f"must have token ids as its names, got {text[:40]!r}", field="logit_bias")
    return int(text)
