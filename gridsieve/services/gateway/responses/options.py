"""The options of a request for the client, from the fields of its body."""

from __future__ import annotations

from gridsieve.client.prompt import Options
from gridsieve.services.gateway.chat.options import set_moments, set_tools, template_options_of
from gridsieve.services.gateway.chat.request import ObjectFormat
from gridsieve.services.gateway.responses.request import ResponsesRequest, SchemaFormat


def options_of(request: ResponsesRequest) -> Options:
    """Without the pruning, which is that of the request's own media (`turns_of`). Raises InvalidRequest for a
    tool_choice that is none of the tools."""
    options = Options(
        max_new_tokens=request.max_output_tokens,
        max_thinking_tokens=request.max_thinking_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs="message.output_text.logprobs" in (request.include or ()) or bool(request.top_logprobs),
        top_logprobs=request.top_logprobs,
        parallel_tool_calls=request.parallel_tool_calls,
        template_options=template_options_of(request.chat_template_kwargs),
        cache_salt=request.cache_salt,
        yields=request.service_tier == "flex",
    )
    set_tools(options, request.tools or (), request.tool_choice, "tool_choice")
    if request.moments:
        set_moments(options, request.moments)
    if options["tool_choice"] not in (None, "auto", "none"):
        return options  # no text, whose format some clients send with it
    match request.text.format if request.text else None:
        case ObjectFormat():
            options["json_object"] = True
        case SchemaFormat(schema_=schema):
            options["json_schema"] = schema
    return options
