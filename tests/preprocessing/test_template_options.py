"""What a template shows besides messages: tools, and its own variables; what it does not show is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from demo.checkpoint import CHAT_TEMPLATE
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import Modality
from gridsieve.services.preprocessing.conversation import Conversation
from gridsieve.services.preprocessing.layouts.qwen_vl import PLACEHOLDERS
from gridsieve.services.preprocessing.prompt.plain_text import LARGE_TEXT_CHARS
from gridsieve.services.preprocessing.prompt.tokens import ChatTokens, PromptTexts
from gridsieve.services.preprocessing.prompt.turns import Tool, Turn
from gridsieve.services.preprocessing.rpc.messages import conversation_of
from gridsieve.v1.prompt_pb2 import ROLE_ASSISTANT, ROLE_USER, Message, Part, Prompt
from gridsieve.v1.prompt_pb2 import Tool as ToolMessage
from gridsieve.v1.prompt_pb2 import ToolCall as ToolCallMessage
from tests.preprocessing.templates import (
    CALL,
    CLOCK,
    HELLO,
    MARKS,
    REASONS,
    RESULT,
    TRIMS,
    by_transformers,
    ids_of,
    written,
)


@pytest.fixture(scope="module")
def reasons(tmp_path_factory: pytest.TempPathFactory) -> tuple[ChatTokens, Any]:
    folder = written(tmp_path_factory.mktemp("template"), REASONS, MARKS)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    return ChatTokens(Checkpoint(folder), PromptTexts(placeholders=PLACEHOLDERS, joins_parts="\n")), theirs


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
