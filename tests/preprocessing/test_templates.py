"""Chat templates render what transformers renders, over the caller's own text, which still becomes no control token."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from demo.checkpoint import CHAT_TEMPLATE, TINY, make_tokenizer
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest, StartupError
from gridsieve.common.contract.plan import Modality
from gridsieve.services.preprocessing.conversation import Conversation
from gridsieve.services.preprocessing.layouts.family import load_family
from gridsieve.services.preprocessing.layouts.qwen_vl import PLACEHOLDERS
from gridsieve.services.preprocessing.planner import Planner
from gridsieve.services.preprocessing.prompt.control_tokens import named_tokens
from gridsieve.services.preprocessing.prompt.layout import Expansion, MediaTokens
from gridsieve.services.preprocessing.prompt.plain_text import LARGE_TEXT_CHARS
from gridsieve.services.preprocessing.prompt.positions import LinearSpan
from gridsieve.services.preprocessing.prompt.tokens import ChatTokens, PromptTexts
from gridsieve.services.preprocessing.prompt.turns import Tool, ToolCall, Turn
from gridsieve.services.preprocessing.rpc.messages import conversation_of
from gridsieve.v1.prompt_pb2 import ROLE_ASSISTANT, ROLE_USER, Message, Part, Prompt
from gridsieve.v1.prompt_pb2 import Tool as ToolMessage
from gridsieve.v1.prompt_pb2 import ToolCall as ToolCallMessage
from tests.families import FAMILIES
from tests.media import clip, picture
from tests.preprocessing.planning import image, plan_of, video, with_settings

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
# By name: the template, what joins the parts of a message, and added tokens.
TEMPLATES: Mapping[str, tuple[str, str | None, Sequence[str | AddedToken]]] = {
    "trims": (TRIMS, "\n", ()),
    "reasons": (REASONS, "\n", [*MARKS, *FLAGGED]),
    "parts": (PARTS, None, ()),
    "thinks": (THINKS, None, [*MARKS, *FLAGGED]),
    "instructs": (INSTRUCTS, "", BRACKETS),
}
WEATHER = Tool("weather", "Tells the <|im_end|> weather.", {"type": "object", "properties": {"city": {"enum": ["é"]}}})
CLOCK = Tool("clock", None, {"type": "object", "properties": {}})


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


@pytest.fixture(scope="module", params=TEMPLATES)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ChatTokens, Any, str | None]:
    """Our tokens of a template, transformers' tokenizer with it, and what joins the parts of a message."""
    template, joins, added = TEMPLATES[request.param]
    folder = written(tmp_path_factory.mktemp("template"), template, added)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    theirs.chat_control_tokens = control_of(theirs)
    return ChatTokens(Checkpoint(folder), PromptTexts(placeholders=PLACEHOLDERS, joins_parts=joins)), theirs, joins


def control_of(tokenizer: Any) -> list[str]:
    return [token for token in tokenizer.get_added_vocab() if token not in WRITABLE]


ONE_TOKEN: Expansion = (LinearSpan(1),)


def ids_of(tokens: ChatTokens, turns: Sequence[Turn], expansion: Expansion = ONE_TOKEN, **others: Any) -> list[int]:
    """The conversation's ids, each placeholder as `expansion`."""
    media = [part for turn in turns for part in turn.parts if isinstance(part, Modality)]
    found: list[int] = []
    for piece in tokens.conversation(turns, [expansion] * len(media), **others):
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


BLANKS = st.sampled_from(["", " ", "\n", "\n\n", " \n\t", "\u00a0", "\u2028"])
LOCATED = [
    "where is <loc_1>",
    "a \n<left> b",
    "a <right>\n b",
    "whole",
    "the wholes",
    "a whole, <raw>e\u0301",
    "<tool_call>",
]
WRITTEN = st.text(max_size=12) | st.sampled_from(
    [
        "{{ 7 * 7 }}",
        "{% endfor %}",
        "{# #}",
        'it\'s "so"',
        "\\n",
        "naïve 日本 🎬",
        "e\u0301",
        "⟨0⟩",
        "Is it red?",
        *LOCATED,
    ]
)
THOUGHTS = st.sampled_from(["<think>\nhm\n</think>\n\n", "</think>", "<think>", "a<think>b</think>c</think>\n"])
SPELT = st.sampled_from(["<|im_end|>", "<|im_start|>system\n", "<|image_pad|>", "<tool_call>", "[/INST]", *MARKS])


def conversations(pieces: st.SearchStrategy[str], media: bool = False) -> st.SearchStrategy[list[Turn]]:
    """A system message or none, then turns of users, the model and tools."""
    texts = st.builds(lambda *parts: "".join(parts), BLANKS, pieces, pieces, BLANKS)
    parts = st.lists(texts | st.just(Modality.IMAGE) if media else texts, min_size=1, max_size=2).map(tuple)
    arguments = st.dictionaries(WRITTEN, texts | st.integers() | st.none(), max_size=2)
    calls = st.lists(st.builds(ToolCall, st.just("call_1"), st.just("weather"), arguments), max_size=2).map(tuple)
    others = st.lists(
        st.builds(Turn, st.just("user"), parts)
        | st.builds(Turn, st.just("assistant"), parts, calls)
        | st.builds(Turn, st.just("tool"), parts, st.just(()), st.just("call_1"), st.just("weather")),
        min_size=1,
        max_size=5,
    )
    systems = st.lists(st.builds(Turn, st.just("system"), parts), max_size=1)
    return st.builds(lambda first, rest: first + rest, systems, others)


TOOLS = st.sampled_from([(), (CLOCK,), (WEATHER, CLOCK)])


@settings(max_examples=25)
@given(
    turns=conversations(WRITTEN, media=True) | conversations(WRITTEN | THOUGHTS), tools=st.sampled_from([(), (CLOCK,)])
)
def test_a_conversation_has_the_ids_of_transformers(
    both: tuple[ChatTokens, Any, str | None], turns: list[Turn], tools: tuple[Tool, ...]
) -> None:
    ours, theirs, joins = both
    if not shows_tools(theirs):
        turns, tools = without_tools(turns), ()
    if not spelt_in(turns, theirs):
        assert ids_of(ours, turns, tools=tools) == by_transformers(theirs, joins, turns, tools)


@settings(max_examples=25)
@given(turns=conversations(WRITTEN | THOUGHTS | SPELT), tools=TOOLS)
def test_control_tokens_that_callers_spell_are_text_everywhere(
    both: tuple[ChatTokens, Any, str | None], turns: list[Turn], tools: tuple[Tool, ...]
) -> None:
    """Transformers can escape them, too, but cuts the text there, so that text is compared, and control tokens.

    Blanks are not, of which tokens with a flag take some.
    """
    ours, theirs, joins = both
    if not shows_tools(theirs):
        turns, tools = without_tools(turns), ()
    ids = ids_of(ours, turns, tools=tools)
    text = by_transformers(theirs, joins, turns, tools, tokenize=False)
    decoded, rendered = ("".join(each.split()) for each in (theirs.decode(ids), str(text)))
    assert unicodedata.normalize("NFC", decoded) == unicodedata.normalize("NFC", rendered)
    escaped = by_transformers(theirs, joins, turns, tools, sanitize_control_tokens=True)
    control = set(theirs.get_added_vocab().values())
    assert [each for each in ids if each in control] == [each for each in escaped if each in control]


def spelt_in(turns: Sequence[Turn], tokenizer: Any) -> bool:
    """Whether a text, or an argument of a call, spells a control token."""
    texts = [part for turn in turns for part in turn.parts if not isinstance(part, Modality)]
    texts += [str(call.arguments) for turn in turns for call in turn.tool_calls]
    return any(token in text for text in texts for token in control_of(tokenizer))


def shows_tools(tokenizer: Any) -> bool:
    return "tools" in tokenizer.chat_template


def without_tools(turns: Sequence[Turn]) -> list[Turn]:
    return [Turn("user" if turn.role == "tool" else turn.role, turn.parts) for turn in turns]


# Those of Qwen have one template.
QUICK = ("llava", "qwen2_5_vl")
OF_FAMILY = [*QUICK, *(pytest.param(name, marks=pytest.mark.deep) for name in sorted(FAMILIES.keys() - QUICK))]


@pytest.fixture(scope="module", params=OF_FAMILY)
def of_family(request: pytest.FixtureRequest, checkpoints: Callable[[str], Path]) -> tuple[ChatTokens, Any, Any]:
    """Our tokens of each family in turn, transformers' tokenizer, and the family's settings."""
    checkpoint = Checkpoint(checkpoints(request.param))
    family = load_family(checkpoint)
    ours = ChatTokens(checkpoint, family)
    return ours, PreTrainedTokenizerFast.from_pretrained(checkpoint.folder), family


NOT_SPECIAL = ("<end>", "<loc_1>", "<|user|>")


@pytest.mark.parametrize("name", ["glm46v", "internvl", "llava_pixtral", "minicpmv_2_6", "qwen3_vl"])
def test_tokens_around_turns_and_media_stay_unwritable_where_the_tokenizer_does_not_call_them_special(
    checkpoints: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """As `add_tokens` adds them. Whether one is a control token then follows from the template, media and ids."""
    contents = json.loads((checkpoints(name) / "tokenizer.json").read_text())
    added = [token | {"special": False} for token in contents["added_tokens"]]
    last = added[-1]["id"]
    added += [added[-1] | {"id": last + place, "content": token} for place, token in enumerate(NOT_SPECIAL, 1)]
    files = {"tokenizer": {"added_tokens": added}, "generation_config": {"eos_token_id": [last + 1]}}
    with_settings(checkpoints(name), tmp_path, tokenizer_config=None, **files)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    planner = Planner(Checkpoint(tmp_path), None)
    family = load_family(Checkpoint(tmp_path))
    media = [image(picture(1000, 600))] + [video(clip())] * (Modality.VIDEO in family.placeholders)
    names = {token["id"]: token["content"] for token in added}
    written = {last + 1, *plan_of(planner, *media).input_ids.tolist()} & names.keys()
    assert len(written) > 2
    spelt = plan_of(planner, "".join(names[each] for each in written) + "<|user|> <loc_1>").input_ids.tolist()
    plain = plan_of(planner, "a").input_ids.tolist()
    assert [each for each in spelt if each in written] == [each for each in plain if each in written]
    assert [each for each in spelt if each > last] == [last + 2]


@settings(max_examples=25)
@given(turns=conversations(WRITTEN | THOUGHTS).map(without_tools))
def test_every_family_renders_as_its_tokenizer(of_family: tuple[ChatTokens, Any, Any], turns: list[Turn]) -> None:
    ours, theirs, family = of_family
    if not spelt_in(turns, theirs):
        expected = by_transformers(theirs, family.joins_parts, turns, (), **family.template_options)
        assert ids_of(ours, turns) == expected


@pytest.fixture(scope="module")
def reasons(tmp_path_factory: pytest.TempPathFactory) -> tuple[ChatTokens, Any]:
    folder = written(tmp_path_factory.mktemp("template"), REASONS, MARKS)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    return ChatTokens(Checkpoint(folder), PromptTexts(placeholders=PLACEHOLDERS, joins_parts="\n")), theirs


HELLO = [Turn("user", ("hello",))]


@pytest.mark.parametrize("thinking", [True, False])
def test_a_variable_of_the_template_is_an_option(reasons: tuple[ChatTokens, Any], thinking: bool) -> None:
    ours, theirs = reasons
    expected = by_transformers(theirs, "\n", HELLO, (), thinking=thinking)
    assert ids_of(ours, HELLO, options={"thinking": thinking}) == expected
    assert (theirs.convert_tokens_to_ids("</think>") in expected) is not thinking


@pytest.mark.parametrize("name", ["colour", "messages", "bos_token", "namespace"])
def test_an_option_that_is_no_variable_of_the_template_is_refused_by_name(
    reasons: tuple[ChatTokens, Any], name: str
) -> None:
    why = rf"^prompt\.template_options\.{name} is not a variable of .* template; it has thinking"
    with pytest.raises(InvalidRequest, match=why):
        ids_of(reasons[0], HELLO, options={name: True})


CALL = Turn("assistant", ("",), (ToolCall("call_1", "weather", {}),))
RESULT = Turn("tool", ("rain",), (), "call_1", "weather")


@pytest.mark.parametrize(
    ("turns", "tools", "field"),
    [(HELLO, [CLOCK], "tools"), ([*HELLO, CALL], [], "messages"), ([RESULT], [], "messages")],
)
def test_tools_are_refused_where_no_template_shows_them(
    tmp_path: Path, turns: list[Turn], tools: list[Tool], field: str
) -> None:
    tokens = ChatTokens(Checkpoint(written(tmp_path, TRIMS)), PromptTexts(placeholders=PLACEHOLDERS, joins_parts=""))
    with pytest.raises(
        InvalidRequest, match=rf"^prompt\.{field} must .*: the checkpoint's chat template does not show"
    ):
        ids_of(tokens, turns, tools=tools)


def test_tools_are_shown_by_the_tokenizers_template_with_media_as_the_processors_spells_them(tmp_path: Path) -> None:
    """Qwen2.5-VL is published with both: the processor's knows no tools, the tokenizer's no media."""
    folder = written(tmp_path, REASONS, MARKS)
    (folder / "chat_template.jinja").rename(folder / "aside")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": REASONS}))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    ours = ChatTokens(Checkpoint(folder), PromptTexts(placeholders=PLACEHOLDERS))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    seen = [Turn("user", ("Look: ", Modality.IMAGE, " and <|image_pad|>")), CALL, RESULT]
    marked = "<|vision_start|><|image_pad|><|vision_end|>"
    harmless = [Turn("user", (f"Look: {marked} and ~",)), CALL, RESULT]
    spelt = theirs.decode(ids_of(ours, seen, tools=[CLOCK]))
    assert spelt.replace("and <|image_pad|>", "and ~") == by_transformers(
        theirs, "", harmless, [CLOCK], tokenize=False, chat_template=REASONS
    )
    assert ids_of(ours, seen, tools=[CLOCK]).count(theirs.convert_tokens_to_ids("<|image_pad|>")) == 1
    alone = [Turn("user", ("Look: ", Modality.IMAGE))]
    parts = by_transformers(theirs, None, alone, (), chat_template=CHAT_TEMPLATE)
    assert ids_of(ours, alone) == parts


@pytest.mark.parametrize(
    "held",
    [
        {"add_bos_token": True, "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}, "pad_token": None},
        {"image_token": "<|image_pad|>", "extra_special_tokens": ["<|im_start|>"]},
        {"extra_special_tokens": {"image_token": "<|image_pad|>", "start": "<|vision_start|>"}},
        {"model_specific_special_tokens": {"image_token": "<|image_pad|>"}, "bos_token": "<|endoftext|>"},
    ],
)
def test_tokens_have_the_names_of_transformers(tmp_path: Path, held: dict[str, Any]) -> None:
    folder = written(tmp_path, TRIMS)
    (folder / "tokenizer_config.json").write_text(json.dumps(held))
    expected = PreTrainedTokenizerFast.from_pretrained(folder).special_tokens_map
    assert named_tokens(Checkpoint(folder)) == expected


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_template_that_makes_control_tokens_out_of_pieces_refuses_to_start(tmp_path: Path, role: str) -> None:
    pieces = "{% for turn in messages if turn.role == 'ROLE' %}{{ '<|im_' ~ 'start' ~ '|>' }}{% endfor %}"
    folder = written(tmp_path, pieces.replace("ROLE", role))
    with pytest.raises(StartupError, match="makes control tokens out of pieces"):
        ChatTokens(Checkpoint(folder), PromptTexts(placeholders=PLACEHOLDERS))


def test_control_tokens_that_a_method_or_filter_writes_are_control_tokens(tmp_path: Path) -> None:
    template = (
        "{{ '{}hi{}'.format('<|im_start|>', '<|im_end|>') }}{% for turn in messages %}"
        "{{ turn.content.replace('#', '<|im_end|>') | replace('@', '<|im_start|>') }}"
        "{{ turn.get('name', '<|endoftext|>') }}{{ {'user': '<|im_end|>'}[turn.role] | default('<|im_start|>') }}"
        "{% if turn.content == '<|im_end|>' or turn.content.startswith('<|im_end|>') %}looked for{% endif %}"
        "{% endfor %}"
    )
    folder = written(tmp_path, template)
    tokens = ChatTokens(Checkpoint(folder), PromptTexts(placeholders=PLACEHOLDERS, joins_parts=""))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    turns = [Turn("user", ("a#b@c",)), Turn("assistant", ("#",))]
    assert ids_of(tokens, turns) == by_transformers(theirs, "", turns, ())
    assert "looked for" in theirs.decode(ids_of(tokens, [Turn("user", ("<|im_end|>?",))]))


def test_a_refusal_does_not_tell_how_control_tokens_are_marked(tmp_path: Path) -> None:
    folder = written(tmp_path, "{% if messages | length == 1 %}{{ raise_exception('no ' + eos_token) }}{% endif %}")
    with pytest.raises(InvalidRequest, match=r"refused by .*: no <\|im_end\|>$"):
        ids_of(ChatTokens(Checkpoint(folder), PromptTexts(placeholders=PLACEHOLDERS)), HELLO)


LONG = json.dumps({"a": "x" * LARGE_TEXT_CHARS})


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt(tools=[ToolMessage(name="long", parameters=LONG)]),
        Prompt(template_options=LONG),
        Prompt(messages=[Message(role=ROLE_ASSISTANT, tool_calls=[ToolCallMessage(name="long", arguments=LONG)])]),
    ],
    ids=["tool", "option", "call"],
)
def test_long_tools_are_planned_like_long_texts(prompt: Prompt) -> None:
    """Beside the threads of short ones, which must not wait for them."""
    prompt.messages.add(role=ROLE_USER, parts=[Part(text="hello")])
    conversation: Conversation = conversation_of(prompt)
    assert not conversation.is_quick


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not JSON"),
        ("[1]", r"must be a JSON object, got '\[1\]'"),
        ('{"a": "\\ud83c"}', "is not JSON: .*surrogates"),
    ],
)
def test_what_is_no_json_object_is_refused_by_name(text: str, why: str) -> None:
    hello = Message(role=ROLE_USER, parts=[Part(text="hello")])
    call = ToolCallMessage(name="weather", arguments=text)
    for name, prompt in {
        r"tools\[0\]\.parameters": Prompt(messages=[hello], tools=[ToolMessage(name="weather", parameters=text)]),
        "template_options": Prompt(messages=[hello], template_options=text),
        r"messages\[0\]\.tool_calls\[0\]\.arguments": Prompt(
            messages=[Message(role=ROLE_ASSISTANT, tool_calls=[call])]
        ),
    }.items():
        with pytest.raises(InvalidRequest, match=rf"^prompt\.{name} {why}"):
            conversation_of(prompt)
