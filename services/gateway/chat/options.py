"""The options of a request for the client, from the fields of its body."""

from __future__ import annotations

from collections.abc import Mapping

from common.contract.errors import InvalidRequest
from framesieve.client.prompt import Options
from services.gateway.chat.request import ChatRequest, MediaOptions, ObjectFormat, SchemaFormat

_SAME_NAMES = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "n"),
    *("stop_token_ids", "ignore_eos", "logprobs", "top_logprobs"),
)


def options_of(request: ChatRequest) -> Options:
    """Raises InvalidRequest for fields that contradict one another."""
    options = Options()
    given: Mapping[str, object] = {name: getattr(request, name) for name in _SAME_NAMES}
    options.update({name: value for name, value in given.items() if value is not None})  # type: ignore[typeddict-item]
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise InvalidRequest(
            f"max_tokens must not differ from max_completion_tokens, got {request.max_tokens} and "
            f"{request.max_completion_tokens}"
        )
    options["max_new_tokens"] = (
        request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    )
    if request.top_k is not None:
        options["top_k"] = 0 if request.top_k == -1 else request.top_k  # vLLM's spelling of "all"
    if request.stop is not None:
        options["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
    options.update(pruning_of(request))
    match request.response_format:
        case ObjectFormat():
            options["json_object"] = True
        case SchemaFormat(json_schema=given_schema):
            options["json_schema"] = given_schema.schema_
    return options


def pruning_of(request: MediaOptions) -> Options:
    """The pruning of every video without its own."""
    if request.pruning is None:
        return Options()
    return Options(
        pruning_rate=request.pruning.rate, pruning_method=request.pruning.method, pruning_seed=request.pruning.seed
    )
