"""Chat templates in the manner of published ones, and what they render: here, and in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from demo.checkpoint import TINY, make_tokenizer
from gridsieve.common.contract.plan import Modality
from gridsieve.services.preprocessing.layouts.qwen_vl import PLACEHOLDERS
from gridsieve.services.preprocessing.prompt.layout import Expansion, MediaTokens, SharedId
from gridsieve.services.preprocessing.prompt.positions import LinearSpan
from gridsieve.services.preprocessing.prompt.tokens import ChatTokens
from gridsieve.services.preprocessing.prompt.turns import Tool, ToolCall, Turn

# Added tokens that are not special: tags that templates write, too, and tokens of each flag.
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
FLAGGED = [
    AddedToken("<loc_1>"),
    AddedToken("<raw>", normalized=False),
    AddedToken("<left>", lstrip=True),
    AddedToken("<right>", rstrip=True, normalized=False),
    AddedToken("whole", single_word=True),
]
WRITABLE = {*MARKS, *(token.content for token in FLAGGED)}
# As MiniCPM-V 2.5: texts without blanks around them.
TRIMS = (
    "{% set ends = '<|im_end|>' %}{% for turn in messages %}{{ '<|im_start|>' ~ turn['role'] }}\n\n"
    "{{ turn['content'] | trim + ends }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
# As Qwen3 and MiniCPM-V 4.5: tools, their calls and results, and no reasoning before the last question.
REASONS = """\
{%- macro shown(call) -%}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endmacro -%}
{%- set state = namespace(asked=-1) -%}
{%- for turn in messages if turn.role == 'user' and not turn.content.startswith('<tool_response>') -%}
  {%- set state.asked = messages.index(turn) -%}
{%- endfor -%}
{%- if tools -%}
  {{- '<|im_start|>system\\nFunctions:' -}}
  {%- for tool in tools -%}{{ '\\n' ~ (tool | tojson) }}{%- endfor -%}
  {{- '\\nTo call one: <tool_call>{"name": …}</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for turn in messages -%}
  {%- set said = turn.content -%}
  {%- if turn.role == 'assistant' and '</think>' in said -%}
    {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
    {%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
    {%- if loop.index0 > state.asked -%}
      {%- set said = '<think>\\n' + thought + '\\n</think>\\n\\n' + said -%}
    {%- endif -%}
  {%- endif -%}
  {%- if turn.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
    {{- '\\n<tool_response>\\n' ~ said ~ '\\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
  {%- else -%}
    {{- '<|im_start|>%s\\n' % turn.role + said -}}
    {%- for call in turn.tool_calls or [] -%}{{ '\\n' ~ shown(call) }}{%- endfor -%}
    {{- '<|im_end|>' + '\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if thinking is defined and not thinking -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}
{%- endif -%}
"""
# As LLaVA: parts, and a mark of what is trained.
PARTS = (
    "{% for turn in messages %}{{ turn['role'].upper() ~ ': ' }}"
    "{% for part in turn['content'] | selectattr('type', 'equalto', 'image') %}{{ '<|image_pad|>\n' }}{% endfor %}"
    "{% for part in turn['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ part['text'] + ' ' }}{% endgeneration %}{% endfor %}{% endfor %}ASSISTANT:"
)
# As Qwen3.5: parts without the blanks around them, calls in tags, and an opened thought, by default of large models.
THINKS = """\
{%- macro said(content) -%}
  {%- for part in content -%}
    {%- if part.type == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
    {%- elif part.type == 'video' -%}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
    {%- else -%}{{ part.text }}{%- endif -%}
  {%- endfor -%}
{%- endmacro -%}
{%- if tools -%}
  {{- '<|im_start|>system\\nFunctions:' -}}
  {%- for tool in tools -%}{{ '\\n' + (tool | tojson) }}{%- endfor -%}
  {{- '\\nTo call one: <tool_call><function=name>…</function></tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for turn in messages -%}
  {%- set text = said(turn.content) | trim -%}
  {%- if turn.role == 'assistant' and '</think>' in text -%}
    {%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
  {%- endif -%}
  {%- if turn.role == 'tool' -%}
    {{- '<|im_start|>user\\n<tool_response>\\n' + text + '\\n</tool_response><|im_end|>\\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + turn.role + '\\n' + text -}}
    {%- for call in turn.tool_calls or [] -%}
      {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
      {%- for name, value in call.function.arguments.items() -%}
        {{- '<parameter=' + name + '>\\n' -}}
        {{- value | string if value is string or value is number else value | tojson | safe -}}
        {{- '\\n</parameter>\\n' -}}
      {%- endfor -%}
      {{- '</function>\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\\n\\n</think>\\n\\n' }}
  {%- else -%}{{ '<think>\\n' }}{%- endif -%}
{%- endif -%}
"""
# As Mistral: tools before the last question.
INSTRUCTS = (
    "{{ bos_token }}{% for turn in messages %}{% if turn.role == 'user' %}"
    "{% if tools is not none and turn == messages[-1] %}{{ '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{% endif %}"
    "{{ '[INST]' + turn.content.replace('[/INST]', '') + '[/INST]' }}{% elif turn.role == 'assistant' %}"
    "{{ ' ' + turn.content | trim }}{% for call in turn.tool_calls %}{{ '[CALL]' ~ call | tojson }}{% endfor %}"
    "{{ eos_token }}{% else %}{{ ('tool' in turn.role and '[RESULT]' or '') ~ turn.content }}{% endif %}{% endfor %}"
)
BRACKETS = ["[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALL]", "[RESULT]"]
CLOCK = Tool("clock", None, {"type": "object", "properties": {}})
HELLO = [Turn("user", ("hello",))]
CALL = Turn("assistant", ("",), (ToolCall("call_1", "weather", {}),))
RESULT = Turn("tool", ("rain",), (), "call_1", "weather")


def written(folder: Path, template: str, added: Sequence[str | AddedToken] = ()) -> Path:
    """A checkpoint's folder with a tokenizer and this chat template."""
    folder.mkdir(exist_ok=True)
    tokenizer = make_tokenizer(TINY)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.add_tokens(list(added))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def control_of(tokenizer: Any) -> list[str]:
    return [token for token in tokenizer.get_added_vocab() if token not in WRITABLE]


ONE_TOKEN: Expansion = (LinearSpan(1),)


def ids_of(tokens: ChatTokens, turns: Sequence[Turn], expansion: Expansion = ONE_TOKEN, **others: Any) -> list[int]:
    """The conversation's ids, each placeholder as `expansion`."""
    media = [part for turn in turns for part in turn.parts if isinstance(part, Modality)]
    found: list[int] = []
    for piece in tokens.conversation(turns, [expansion] * len(media), **others):
        assert not isinstance(piece, SharedId)
        found += [piece.pad_id] * piece.size if isinstance(piece, MediaTokens) else piece.tolist()
    return found


def by_transformers(
    tokenizer: Any, joins: str | None, turns: Sequence[Turn], tools: Sequence[Tool], **how: Any
) -> list[int] | str:
    messages = []
    for turn in turns:
        message: dict[str, Any] = {"role": turn.role}
        if joins is None:
            message["content"] = [
                {"type": part.value} if isinstance(part, Modality) else {"type": "text", "text": part}
                for part in turn.parts
            ]
        else:
            spelt = (PLACEHOLDERS[part] if isinstance(part, Modality) else part for part in turn.parts)
            message["content"] = joins.join(spelt)
        if turn.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.tool_calls
            ]
        if turn.role == "tool":
            message |= {"tool_call_id": turn.tool_call_id, "name": turn.tool_name}
        messages.append(message)
    functions = []
    for tool in tools:
        described = {"description": tool.description} if tool.description else {}
        function = {"name": tool.name, **described, "parameters": tool.parameters}
        functions.append({"type": "function", "function": function})
    result: list[int] | str = tokenizer.apply_chat_template(
        messages, tools=functions or None, add_generation_prompt=True, return_dict=False, **how
    )
    return result
