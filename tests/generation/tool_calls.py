"""What tests of tool calls share: the forms of calls, how templates write calls, and how an answer is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from gridsieve.services.generation.sampling.answer_reader import AnswerReader
from gridsieve.services.generation.sampling.call_forms import FORMS, CallForm
from gridsieve.services.generation.sampling.thoughts import Thought
from gridsieve.services.generation.sampling.tool_calls import CallDelta, Tool, ToolUse

BEGIN, END = "<tool_call>", "</tool_call>"
# By what their templates say.
HERMES, TAGS, PAIRS, NAMES, LIST, TOOLCALL = (
    dict(FORMS)[said] for said in ("<tool_call>", "<function=", "<arg_key>", "[ARGS]", "[TOOL_CALLS]", "<TOOLCALL>")
)


def read(
    pieces: Sequence[str],
    single: bool = False,
    form: CallForm = HERMES,
    called: Sequence[Tool] = (Tool("weather", "", False, 0),),
    thought: Thought | None = None,
    stopped: bool = False,
) -> tuple[str, list[tuple[str, str]], str]:
    """The text, the names and arguments of the calls, and the thought of an answer that arrives in these pieces."""
    reader = AnswerReader(form, ToolUse(tuple(called), single=single), thought)
    said, shown, deltas = "", "", list[CallDelta]()
    for thinks, text, calls in [*map(reader.read, pieces), reader.end(stopped=stopped)]:
        said += thinks
        shown += text
        deltas += calls
    first = {delta.index: delta for delta in reversed(deltas)}
    assert [*first] == [*range(len(first))][::-1]
    assert all(delta.id and delta.name for delta in first.values())
    assert len({delta.id for delta in first.values()}) == len(first)
    assert all(not (delta.id or delta.name) for delta in deltas if delta is not first[delta.index])
    joined = [
        (first[index].name, "".join(each.arguments for each in deltas if each.index == index))
        for index in range(len(first))
    ]
    return shown, joined, said


# How published templates write calls: those of Qwen3-VL, Qwen3.5, GLM-4.5V, Mistral Small 3.2 and 3.1, and Nemotron v2.
WRITTEN = {
    HERMES: """\
{%- for call in messages[0].tool_calls %}
{%- if not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' }}{{- call.function.name }}{{- '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}""",
    TAGS: """\
{%- for call in messages[0].tool_calls %}
{%- if not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' }}
{%- if value is mapping or (value is sequence and value is not string) %}{{- value | tojson | safe }}
{%- else %}{{- value | string }}{%- endif %}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}""",
    PAIRS: """\
{%- for call in messages[0].tool_calls %}
{{- '\\n<tool_call>' + call.function.name }}
{%- for name, value in call.function.arguments.items() %}
{{- '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
{{- value | tojson(ensure_ascii=False) if value is not string else value }}{{- '</arg_value>' }}
{%- endfor %}
{{- '\\n</tool_call>' }}
{%- endfor %}""",
    NAMES: """\
{%- for call in messages[0].tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]123456789[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}""",
    LIST: """\
{{- '[TOOL_CALLS][' }}
{%- for call in messages[0].tool_calls %}
{{- call.function | tojson }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}
{{- ']' }}""",
    TOOLCALL: """\
{{- '<TOOLCALL>[' }}
{%- for call in messages[0].tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}
{{- ']</TOOLCALL>' }}""",
}
KINDS = {
    "city": "string",
    "days": "integer",
    "rate": "number",
    "metric": "boolean",
    "none": "null",
    "at": "array",
    "of": "object",
}
MANY = Tool("weather", json.dumps({"properties": {name: {"type": kind} for name, kind in KINDS.items()}}), False, 0)


def written(form: CallForm, calls: Sequence[dict[str, Any]]) -> str:
    """The turn in which transformers writes these calls of the tool MANY."""
    functions = [{"function": {"name": "weather", "arguments": each}} for each in calls]
    turn = {"role": "assistant", "content": "", "tool_calls": functions}
    return str(render_jinja_template([[turn]], chat_template=WRITTEN[form])[0][0])
