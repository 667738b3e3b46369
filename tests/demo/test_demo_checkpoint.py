"""The demo's tokenizer keeps any text, and its training forward agrees with the model's."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from demo.checkpoint import TINY, write_checkpoint
from demo.model import TIME_STEP, UNSUPERVISED, Prompt, PromptWriter, answer_logits
from gridsieve.common.contract.plan import Grid
from gridsieve.services.preprocessing.prompt.positions import GridSpan

GRID = Grid(3, 4, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), TINY, seed=3)


@pytest.fixture(scope="module")
def model(folder: Path) -> Qwen2_5_VLForConditionalGeneration:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


def test_the_tokenizer_round_trips_any_text(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "What moves? naïve 日本 it's 42\n\n  x🙂 \t"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@torch.no_grad()
def test_one_branch_equals_a_plain_forward(
    model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> None:
    writer = PromptWriter(tokenizer)
    embeds = torch.randn(1, GRID.tokens, TINY.hidden)
    branch = writer.branch("What moves?", "two")
    before = writer.before()
    told = _told(model, embeds, torch.arange(GRID.tokens)[None], [Prompt(before, (branch,))], writer)
    table = model.model.language_model.embed_tokens
    tail = torch.tensor([writer.vision_end, *branch.ids])
    inputs = torch.cat((table(torch.tensor(before)), embeds[0], table(tail)))[None]
    start = len(before)
    media = [(start + 2 * i, start + j, start + k) for i in range(3) for j in range(4) for k in range(4)]
    after = start + max(2 * 2, 3) + 1
    text = [[place] * 3 for place in (*range(start), *range(after, after + len(tail)))]
    positions = torch.tensor([*text[:start], *media, *text[start:]]).T[:, None]
    states = model.model.language_model(inputs_embeds=inputs, position_ids=positions, use_cache=False).last_hidden_state
    answer = len(branch.ids) - branch.answer_at
    expected = model.lm_head(states)[0, -answer - 1 : -1]
    torch.testing.assert_close(told, expected, rtol=1e-4, atol=1e-4)
    assert Fraction(2) == TIME_STEP


def _told(
    model: Qwen2_5_VLForConditionalGeneration,
    embeds: torch.Tensor,
    kept: torch.Tensor,
    prompts: list[Prompt],
    writer: PromptWriter,
) -> torch.Tensor:
    """Logits of all answers' tokens, in order: [L, V]."""
    logits, labels = answer_logits(model, embeds, kept, GridSpan(GRID, TIME_STEP), prompts, writer.vision_end)
    return logits[labels != UNSUPERVISED]
