"""In-process exact match: compares greedy answers of the model's forward with the scene's.

Greedy decoding yields the correct answer exactly if, given the correct previous tokens, the argmax at every position is
the correct token. So one teacher-forced forward judges all questions about a clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from common.contract.plan import Grid
from common.contract.retention import Pruning
from demo.clips import SIDE_PX
from demo.model import TIME_STEP, UNSUPERVISED, Prompt, PromptWriter, answer_logits, embed, prune
from demo.questions import Question, questions_about
from demo.scenes import Pixels, random_scene

BATCH = 8
# Correct answers and questions, by kind of question.
Counts: TypeAlias = dict[str, tuple[int, int]]


@torch.no_grad()
def exact_match(
    model: Qwen2_5_VLForConditionalGeneration,
    writer: PromptWriter,
    clips: Pixels,
    seeds: Sequence[int],
    prunings: Sequence[Pruning],
) -> dict[Pruning, Counts]:
    """For each pruning: the correct answers and questions, by kind, over all questions about all clips."""
    found: dict[Pruning, Counts] = {pruning: {} for pruning in prunings}
    for start in range(0, len(seeds), BATCH):
        batch = torch.from_numpy(clips[start : start + BATCH].copy())
        asked = [questions_about(random_scene(seed), Random(seed)) for seed in seeds[start : start + BATCH]]
        grid = Grid(batch.shape[1] // 2, SIDE_PX // 28, SIDE_PX // 28)
        embeds = embed(model, batch)
        prompts = [
            Prompt(writer.before(), tuple(writer.branch(question.text, question.answer) for question in questions))
            for questions in asked
        ]
        for pruning in prunings:
            kept = prune(embeds, grid, pruning)
            logits, labels = answer_logits(model, embeds, kept, grid, TIME_STEP, prompts, writer.vision_end)
            wrong = (logits.argmax(-1) != labels) & (labels != UNSUPERVISED)
            for row, (questions, prompt) in enumerate(zip(asked, prompts, strict=True)):
                _count(found[pruning], questions, prompt, wrong[row])
    return found


def share_right(counts: Counts) -> float:
    return sum(right for right, _ in counts.values()) / sum(asked for _, asked in counts.values())


def _count(counts: Counts, questions: Sequence[Question], prompt: Prompt, wrong: Tensor) -> None:
    # Logits begin at <|vision_end|>, one position before the first branch.
    at = 1
    for question, branch in zip(questions, prompt.branches, strict=True):
        right, asked = counts.get(question.kind, (0, 0))
        counts[question.kind] = (right + (not wrong[at : at + len(branch.ids)].any()), asked + 1)
        at += len(branch.ids)
