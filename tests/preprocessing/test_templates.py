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

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest, StartupError
from gridsieve.common.contract.plan import Modality
from gridsieve.services.preprocessing.layouts.family import load_family
from gridsieve.services.preprocessing.layouts.qwen_vl import PLACEHOLDERS
from gridsieve.services.preprocessing.planner import Planner
from gridsieve.services.preprocessing.prompt.control_tokens import named_tokens
from gridsieve.services.preprocessing.prompt.tokens import ChatTokens, PromptTexts
from gridsieve.services.preprocessing.prompt.turns import Tool, ToolCall, Turn
from tests.families import FAMILIES
from tests.media import clip, picture
from tests.preprocessing.planning import image, plan_of, video, with_settings
from tests.preprocessing.templates import (
    BRACKETS,
    CLOCK,
    FLAGGED,
    HELLO,
    INSTRUCTS,
    MARKS,
    PARTS,
    REASONS,
    THINKS,
    TRIMS,
    by_transformers,
    control_of,
    ids_of,
    written,
)

# By name: the template, what joins the parts of a message, and added tokens.
TEMPLATES: Mapping[str, tuple[str, str | None, Sequence[str | AddedToken]]] = {
    "trims": (TRIMS, "\n", ()),
    "reasons": (REASONS, "\n", [*MARKS, *FLAGGED]),
    "parts": (PARTS, None, ()),
    "thinks": (THINKS, None, [*MARKS, *FLAGGED]),
    "instructs": (INSTRUCTS, "", BRACKETS),
}
WEATHER = Tool("weather", "Tells the <|im_end|> weather.", {"type": "object", "properties": {"city": {"enum": ["é"]}}})


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
