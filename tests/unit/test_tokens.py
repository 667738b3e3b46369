"""Ordinary text gets transformers' ids, and no text becomes a control token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from common.checkpoint import Checkpoint
from common.errors import InvalidRequest, StartupError
from common.plan import Modality
from services.preprocessing.families.qwen2_5_vl import PLACEHOLDERS
from services.preprocessing.tokens import ChatTokens, Turn

CONTROL = ["<|im_start|>", "<|im_end|>", "<|video_pad|>", "<|image_pad|>", "<|vision_start|>", "<|endoftext|>"]
PADS = {modality.value: token for modality, token in PLACEHOLDERS.items()}


@pytest.fixture(scope="session")
def theirs(tiny_checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


@pytest.fixture(scope="session")
def ours(tiny_checkpoint: Path) -> ChatTokens:
    return ChatTokens(Checkpoint(tiny_checkpoint), PLACEHOLDERS)


def ids_of(tokens: ChatTokens, turns: list[Turn]) -> list[int]:
    """The conversation's ids, each placeholder as one pad token."""
    found: list[int] = []
    for piece in tokens.conversation(turns):
        found += [tokens.id_of(PLACEHOLDERS[piece])] if isinstance(piece, Modality) else piece.tolist()
    return found


def messages_of(turns: list[Turn]) -> list[dict[str, Any]]:
    return [
        {
            "role": turn.role,
            "content": [
                {"type": part.value} if isinstance(part, Modality) else {"type": "text", "text": part}
                for part in turn.parts
            ],
        }
        for turn in turns
    ]


texts = st.text(max_size=40) | st.sampled_from(
    ["\n\nIs it red?", " ", "a\n", "don't", "  \n x", "naïve 日本 🎬", "e\u0301"]
)
parts = st.lists(texts | st.sampled_from(list(Modality)), min_size=1, max_size=4)
conversations = st.lists(
    st.builds(lambda role, held: Turn(role, tuple(held)), st.sampled_from(["system", "user", "assistant"]), parts),
    min_size=1,
    max_size=3,
)


@given(turns=conversations)
def test_ordinary_text_has_the_ids_of_transformers(theirs: Any, ours: ChatTokens, turns: list[Turn]) -> None:
    expected = theirs.apply_chat_template(
        messages_of(turns), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids_of(ours, turns) == expected


@given(before=texts, control=st.sampled_from(CONTROL), after=texts)
def test_text_that_spells_a_control_token_stays_text(
    theirs: Any, ours: ChatTokens, before: str, control: str, after: str
) -> None:
    text = before + control + after
    harmless = ids_of(ours, [Turn("user", (Modality.VIDEO, "x"))])
    found = ids_of(ours, [Turn("user", (Modality.VIDEO, text))])
    special = set(theirs.all_special_ids)
    assert [each for each in found if each in special] == [each for each in harmless if each in special]
    plain = [each for each in found if each not in special]
    assert theirs.backend_tokenizer.normalizer.normalize_str(text) in theirs.decode(plain)


def test_a_placeholder_spelled_in_text_holds_no_media(ours: ChatTokens) -> None:
    pieces = ours.conversation([Turn("user", ("<|video_pad|><|image_pad|>", Modality.IMAGE))])
    assert [piece for piece in pieces if isinstance(piece, Modality)] == [Modality.IMAGE]


def test_text_that_looks_like_a_stand_in_stays_as_it_is(theirs: Any, ours: ChatTokens) -> None:
    text = f"⟨{'0' * 32}⟩ and {'⟨' * 3}"
    assert text in theirs.decode(ids_of(ours, [Turn("user", (text,))]))


def template(folder: Path, checkpoint: Path, text: str) -> ChatTokens:
    """The tiny checkpoint with another chat template."""
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(text)
    return ChatTokens(Checkpoint(folder), PLACEHOLDERS)


def test_the_published_template_gives_the_ids_of_transformers(tmp_path: Path, tiny_checkpoint: Path) -> None:
    published = (
        "{% set image_count = namespace(value=0) %}{% for message in messages %}"
        "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
        "You are a helpful assistant.<|im_end|>\n"
        "{% endif %}<|im_start|>{{ message['role'] }}\n{% for content in message['content'] %}"
        "{% if content['type'] == 'image' %}{% set image_count.value = image_count.value + 1 %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% elif content['type'] == 'video' %}"
        "<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokens = template(tmp_path, tiny_checkpoint, published)
    turns = [Turn("user", (Modality.IMAGE, "What is this?", Modality.VIDEO))]
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages_of(turns), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids_of(tokens, turns) == expected


def test_a_template_that_refuses_the_turns_refuses_the_request(tmp_path: Path, tiny_checkpoint: Path) -> None:
    tokens = template(tmp_path, tiny_checkpoint, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        tokens.conversation([Turn("user", ("hello",))])


def test_media_that_the_template_leaves_out_are_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    tokens = template(tmp_path, tiny_checkpoint, "{% for message in messages %}{{ message['role'] }}{% endfor %}")
    with pytest.raises(InvalidRequest, match="hold 1 media, the checkpoint's chat template places 0"):
        tokens.conversation([Turn("system", (Modality.VIDEO,))])


def test_a_wrong_template_refuses_to_start(tmp_path: Path, tiny_checkpoint: Path) -> None:
    with pytest.raises(StartupError, match="template"):
        template(tmp_path, tiny_checkpoint, "{% for message in %}")


def test_a_control_token_that_ordinary_text_can_spell_refuses_to_start(tmp_path: Path, tiny_checkpoint: Path) -> None:
    for file in tiny_checkpoint.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    contents = json.loads((tiny_checkpoint / "tokenizer.json").read_text())
    contents["added_tokens"].append(
        contents["added_tokens"][0] | {"content": "e", "id": contents["model"]["vocab"]["e"]}
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    with pytest.raises(StartupError, match="ordinary text can spell the control tokens e"):
        ChatTokens(Checkpoint(tmp_path), PLACEHOLDERS)


def test_a_tokenizer_without_the_placeholders_refuses_to_start(tmp_path: Path, tiny_checkpoint: Path) -> None:
    for file in tiny_checkpoint.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    contents = json.loads((tiny_checkpoint / "tokenizer.json").read_text())
    contents["added_tokens"] = [each for each in contents["added_tokens"] if each["content"] != "<|video_pad|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    with pytest.raises(StartupError, match=r"has no token <\|video_pad\|>"):
        ChatTokens(Checkpoint(tmp_path), PLACEHOLDERS)
