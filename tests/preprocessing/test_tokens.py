"""Ordinary text gets the ids of transformers, and no text becomes a control token."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import count, permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest, StartupError, Unavailable
from gridsieve.common.contract.plan import Grid, Modality
from gridsieve.services.preprocessing.layouts.qwen_vl import PLACEHOLDERS
from gridsieve.services.preprocessing.prompt.layout import MediaTokens
from gridsieve.services.preprocessing.prompt.positions import GridSpan, LinearSpan
from gridsieve.services.preprocessing.prompt.tokens import ChatTokens, PromptTexts
from gridsieve.services.preprocessing.prompt.turns import Turn
from tests.preprocessing.planning import with_settings
from tests.preprocessing.templates import by_transformers, ids_of

CONTROL = ["<|im_start|>", "<|im_end|>", "<|video_pad|>", "<|image_pad|>", "<|vision_start|>", "<|endoftext|>"]
ONE, THREE = GridSpan(Grid(1, 1, 1), Fraction(0)), GridSpan(Grid(1, 1, 3), Fraction(0))


@pytest.fixture(scope="session")
def theirs(tiny_checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


@pytest.fixture(scope="session")
def ours(tiny_checkpoint: Path) -> ChatTokens:
    return ChatTokens(Checkpoint(tiny_checkpoint), PromptTexts(placeholders=PLACEHOLDERS))


texts = st.text(max_size=40) | st.sampled_from(
    ["\n\nIs it red?", " ", "a\n", "don't", "  \n x", "naïve 日本 🎬", "e\u0301"]
)
WORDS = "the quick brown fox jumps over a lazy dog, and naïve 日本 watch. "


def test_a_large_text_has_the_ids_of_transformers(theirs: Any, ours: ChatTokens) -> None:
    turns = [Turn("user", (WORDS * 3000,))]
    assert ids_of(ours, turns) == by_transformers(theirs, None, turns, ())


def test_other_threads_run_while_a_large_text_is_tokenised(ours: ChatTokens) -> None:
    with ThreadPoolExecutor(1) as thread:
        # Processor time, because wall time passes while other processes run.
        start = seen = time.process_time()
        tokenised = thread.submit(ids_of, ours, [Turn("user", (WORDS * 2**13,))])
        longest = 0.0
        while not tokenised.done():
            time.sleep(0.005)
            longest, seen = max(longest, time.process_time() - seen), time.process_time()
    assert tokenised.result()
    assert longest < (seen - start) / 2


def test_large_texts_take_turns_until_cancelled_and_small_ones_run_beside_them(ours: ChatTokens) -> None:
    asked = count()

    def check_cancelled() -> None:
        if next(asked) > 10:  # more often than once for each piece of the conversation
            raise Unavailable("the request was cancelled", "preprocessing")

    with ThreadPoolExecutor(2) as threads, ours._text._large:
        waiting = threads.submit(ours.conversation, [Turn("user", ("x" * 2**17,))], [], check_cancelled)
        assert threads.submit(ids_of, ours, [Turn("user", ("x",))]).result(20)
        with pytest.raises(Unavailable, match="was cancelled"):
            waiting.result(20)


@settings(max_examples=60)
@given(before=texts, after=texts, control=st.sampled_from(CONTROL))
def test_text_that_spells_control_tokens_or_an_expansion_stays_text(
    theirs: Any, ours: ChatTokens, before: str, control: str, after: str
) -> None:
    expansion = ("<0.3 seconds><|vision_start|>", THREE, "<|vision_end|>")
    text = f"{before}<0.3 seconds><|vision_start|><|video_pad|>{control}{after}"
    turns = [Turn("user", (text, Modality.VIDEO, text))]
    pieces = ours.conversation(turns, [expansion])
    assert [piece.item for piece in pieces if isinstance(piece, MediaTokens)] == [0]
    harmless = ids_of(ours, [Turn("user", ("x", Modality.VIDEO, "x"))], expansion)
    found = ids_of(ours, turns, expansion)
    special = set(theirs.all_special_ids)
    assert [each for each in found if each in special] == [each for each in harmless if each in special]
    plain = theirs.decode([each for each in found if each not in special])
    assert theirs.backend_tokenizer.normalizer.normalize_str(text) in plain


def test_text_that_looks_like_a_stand_in_is_unchanged(theirs: Any, ours: ChatTokens) -> None:
    text = f"⟨{'0' * 32}⟩ and {'⟨' * 3}"
    assert text in theirs.decode(ids_of(ours, [Turn("user", (text,))]))


def template(folder: Path, checkpoint: Path, text: str) -> ChatTokens:
    """The tiny checkpoint with another chat template."""
    (with_settings(checkpoint, folder, chat_template=None) / "chat_template.jinja").write_text(text)
    return ChatTokens(Checkpoint(folder), PromptTexts(placeholders=PLACEHOLDERS))


FIRST_TEXT = "{{ messages[0]['content'][0]['text'] }}"
TWO_TURNS = [Turn("user", ("hello",)), Turn("system", ("secret",))]
IN_ORDER, SWAPPED = (Turn("user", parts) for parts in permutations((Modality.VIDEO, Modality.IMAGE)))


@pytest.mark.parametrize(
    ("text", "turns", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", TWO_TURNS, "roles must alternate"),
        (FIRST_TEXT, TWO_TURNS, r"^prompt\.messages\[1\] holds text that .* leaves out"),
        ("<|video_pad|><|image_pad|>", [SWAPPED], "hold 2 media, .* chat template places 2"),
        ("<|video_pad|>", [IN_ORDER], "hold 2 media, .* chat template places 1"),
    ],
)
def test_turns_that_the_template_refuses_or_leaves_out_are_refused(
    tmp_path: Path, tiny_checkpoint: Path, text: str, turns: list[Turn], why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why) as refused:
        ids_of(template(tmp_path, tiny_checkpoint, text), turns)
    assert "secret" not in str(refused.value)


def test_a_malformed_template_refuses_to_start(tmp_path: Path, tiny_checkpoint: Path) -> None:
    with pytest.raises(StartupError, match="template"):
        template(tmp_path, tiny_checkpoint, "{% for message in %}")


@pytest.mark.parametrize("change", ["spellable", "no placeholder"])
def test_an_unsafe_tokenizer_refuses_to_start(tmp_path: Path, tiny_checkpoint: Path, change: str) -> None:
    contents = json.loads((tiny_checkpoint / "tokenizer.json").read_text())
    added = contents["added_tokens"]
    if change == "spellable":
        added.append(added[0] | {"content": "e", "id": contents["model"]["vocab"]["e"]})
        why = "ordinary text can spell the control tokens e"
    else:
        contents["added_tokens"] = [each for each in added if each["content"] != "<|video_pad|>"]
        why = r"has no token <\|video_pad\|>"
    with_settings(tiny_checkpoint, tmp_path, tokenizer=contents)
    with pytest.raises(StartupError, match=why):
        ChatTokens(Checkpoint(tmp_path), PromptTexts(placeholders=PLACEHOLDERS))


WITH_IMAGES: list[tuple[str | Modality, ...]] = [
    ("What is  this? ",),
    (Modality.IMAGE, "What is  this? "),
    (" Look: ", Modality.IMAGE, " and ", Modality.IMAGE, "é, compare"),
    ("What is <loc_1> this?<loc_1>", Modality.IMAGE, "<loc_1> and"),
]


@pytest.mark.parametrize("parts", WITH_IMAGES)
def test_llamas_first_mark_and_beginning_are_put_as_by_transformers(
    tmp_path: Path, parts: tuple[str | Modality, ...]
) -> None:
    """Llama marks the beginning of the first text alone, and begins a sequence with a token of its own."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    tokenizer.train_from_iterator(["What is this? Look: and compare", "é"], trainer)
    tokenizer.add_special_tokens(["<s>", "<image>"])
    tokenizer.add_tokens(["<loc_1>"])
    begins = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begins])
    template = (
        "{% for message in messages %}{% for part in message['content'] %}"
        "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}"
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", chat_template=template)
    fast.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    chat = ChatTokens(Checkpoint(tmp_path), PromptTexts(placeholders={Modality.IMAGE: "<image>"}))
    text = "".join("<image><image>" if part is Modality.IMAGE else part for part in parts)
    assert ids_of(chat, [Turn("user", parts)], (LinearSpan(2),)) == fast(text)["input_ids"]
