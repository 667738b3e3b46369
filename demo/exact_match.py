"""In-process exact match: compares greedy answers of the model's forward with the scene's.

Greedy decoding yields the correct answer exactly if, given the correct previous tokens, the argmax at every position is
the correct token. So one teacher-forced forward judges all questions about a clip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from demo.clips import SIDE_PX, scene_of
from demo.drawing import Pixels
from demo.model import TIME_STEP, UNSUPERVISED, Prompt, PromptWriter, answer_logits, embed, prune
from demo.questions import Question, questions_about
from demo.scenes import Scene
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.services.preprocessing.prompt.positions import GridSpan

BATCH = 8


@dataclass(frozen=True, slots=True)
class Judged:
    """Whether one question was answered correctly; `scene` and `question` are their kinds."""

    scene: str
    question: str
    right: bool


@torch.no_grad()
def exact_match(
    model: Qwen2_5_VLForConditionalGeneration,
    writer: PromptWriter,
    clips: Pixels,
    seeds: Sequence[int],
    prunings: Sequence[ItemPruning],
    asked_about: Callable[[Scene, Random], Sequence[Question]] = questions_about,
) -> dict[ItemPruning, list[Judged]]:
    """For each pruning: all questions about all clips, in the same order. asked_about: those about a scene."""
    found: dict[ItemPruning, list[Judged]] = {pruning: [] for pruning in prunings}
    for start in range(0, len(seeds), BATCH):
        batch = torch.from_numpy(clips[start : start + BATCH].copy())
        scenes = [scene_of(seed) for seed in seeds[start : start + BATCH]]
        asked = [asked_about(scene, Random(scene.seed)) for scene in scenes]
        grid = Grid(batch.shape[1] // 2, SIDE_PX // 28, SIDE_PX // 28)
        embeds = embed(model, batch)
        prompts = [
            Prompt(writer.before(), tuple(writer.branch(question.text, question.answer) for question in questions))
            for questions in asked
        ]
        for pruning in prunings:
            kept = prune(embeds, grid, pruning)
            logits, labels = answer_logits(model, embeds, kept, GridSpan(grid, TIME_STEP), prompts, writer.vision_end)
            wrong = (logits.argmax(-1) != labels) & (labels != UNSUPERVISED)
            for scene, questions, prompt, row in zip(scenes, asked, prompts, wrong, strict=True):
                # Logits begin at <|vision_end|>, one position before the first branch.
                at = 1
                for question, branch in zip(questions, prompt.branches, strict=True):
                    right = not row[at : at + len(branch.ids)].any()
                    found[pruning].append(Judged(scene.kind, question.kind, right))
                    at += len(branch.ids)
    return found


def share_right(judged: Iterable[Judged]) -> float:
    rights = [one.right for one in judged]
    return sum(rights) / max(1, len(rights))
