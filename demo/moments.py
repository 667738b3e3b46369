"""Trains a model of the demo's line that tells when things move: `python -m demo.moments`.

It goes on from the demo model's weights, on the demo's own questions and one more, whose answer is a list of moments
(`demo.moves`). The vision tower stays as it is, so clips are encoded once, in several augmentations; half of the clips
of a step get other times (`demo.retiming`). Tokens are dropped at random, at rates drawn uniformly. A second loss asks
the states of the video's tokens, after the language model's second layer, for the number of their slice, through a head
that is discarded afterwards: positions tell times only relative to other tokens, and an answer needs those of the clip.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from demo.checkpoint import DEMO, save_checkpoint
from demo.clips import TRAINING_SEEDS, VALIDATION_SEEDS, cached_clips, scene_of
from demo.draft import encoded, span_of
from demo.drawing import Pixels
from demo.exact_match import exact_match, share_right
from demo.lessons import SYSTEM_SHARE, Lessons
from demo.model import UNSUPERVISED, Prompt, PromptWriter, answer_logits, prune, use_uniform_windows
from demo.moves import KIND, moves_question
from demo.questions import Question, questions_about
from demo.retiming import retimed
from demo.scenes import Scene
from demo.stage import steps
from demo.train import HIGHEST_RATE, PICTURE, SLICES, VIDEO, Schedule, optimisers
from demo.wordings import SYSTEM_PROMPT
from gridsieve.common.checkpoint import DEMO_MODEL
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import RANDOM, ItemPruning

MOMENTS_MODEL = Path("build/gridsieve-demo-moments")
CLIPS, VIEWS, VALIDATED_CLIPS = 500, 3, 48
CLIPS_A_STEP, QUESTIONS_A_CLIP, PICTURES_EVERY = 8, 4, 12
PRUNED_SHARE = 0.8
# The layer before which the second loss reads, and its share.
READ_BEFORE, SLICE_SHARE = 2, 0.3
TEXT_RATE = 1e-3
VALIDATED = (ItemPruning(0.0), ItemPruning(0.75, RANDOM))


class Teacher:
    """Draws steps: clips, of which every second has other times, with some of the demo's questions and one for moments;
    or images with the demo's questions."""

    def __init__(self, model: Any, writer: PromptWriter, lessons: Lessons, clips: int, rng: Random) -> None:
        """clips: how many are encoded, in VIEWS each, and as many images."""
        self._model, self._writer, self._lessons, self._rng = model, writer, lessons, rng
        self._video, self._pictures = encoded(model, lessons, VIEWS * clips), encoded(model, lessons, clips, rng)
        self.slices = nn.Linear(DEMO.hidden, SLICES)
        self._read: list[Tensor] = []
        model.model.language_model.layers[READ_BEFORE].register_forward_pre_hook(
            lambda _, given: self._read.append(given[0])
        )
        self._step = 0

    def loss(self, progress: float) -> Tensor:
        self._step += 1
        if self._step % PICTURES_EVERY == 0:
            chosen = self._rng.sample(range(len(self._pictures.scenes)), CLIPS_A_STEP)
            embeds = self._pictures.embeds[torch.tensor(chosen)].float()
            asked = [
                self._lessons.ask(self._pictures.scenes[index], QUESTIONS_A_CLIP, picture=True) for index in chosen
            ]
            loss, _ = self._answer_loss(embeds, PICTURE, 0.0, asked)
            return loss
        chosen = self._rng.sample(range(len(self._video.scenes)), CLIPS_A_STEP)
        parts, prompts = list[Tensor](), list[Prompt]()
        for place, index in enumerate(chosen):
            scene, shown, left_out = self._video.scenes[index], [*range(SLICES)], ""
            if place % 2:
                scene, shown = retimed(scene, self._rng)
                left_out = "when"  # early or late: a move may now be in the middle
            parts.append(self._video.embeds[index].unflatten(0, (SLICES, -1))[shown].flatten(0, 1).float())
            known = [each for each in questions_about(scene, self._rng) if each.kind != left_out]
            known = self._rng.sample(known, min(QUESTIONS_A_CLIP, len(known)))
            system = SYSTEM_PROMPT if self._rng.random() < SYSTEM_SHARE else None
            prompts.append(self._writer.asked([*known, moves_question(scene, self._rng)], system))
        rate = round(self._rng.uniform(0, HIGHEST_RATE), 3) if self._rng.random() < PRUNED_SHARE else 0.0
        loss, kept = self._answer_loss(torch.stack(parts), VIDEO, rate, prompts)
        begin = max(len(prompt.before) for prompt in prompts)
        told = self.slices(self._read[0][:, begin : begin + kept.shape[1]])
        return loss + SLICE_SHARE * F.cross_entropy(told.flatten(0, 1), (kept // VIDEO.slice_tokens).flatten())

    def _answer_loss(self, embeds: Tensor, grid: Grid, rate: float, prompts: list[Prompt]) -> tuple[Tensor, Tensor]:
        """The loss, and the kept tokens: int64 [B, K]. embeds: [B, t·h·w, D]."""
        self._read.clear()
        kept = prune(embeds, grid, ItemPruning(rate, RANDOM, self._rng.randrange(2**31)))
        logits, labels = answer_logits(self._model, embeds, kept, span_of(grid), prompts, self._writer.vision_end)
        asked = labels != UNSUPERVISED
        return F.cross_entropy(logits[asked], labels[asked]), kept


def asked_about(scene: Scene, rng: Random) -> list[Question]:
    return [*questions_about(scene, rng), moves_question(scene, rng)]


def validate(model: Any, writer: PromptWriter, clips: Pixels, seeds: Sequence[int]) -> None:
    """Prints the shares of answers that are right in full, about clips that no step sees."""
    for pruning, found in exact_match(model, writer, clips, seeds, VALIDATED, asked_about).items():
        known = share_right(one for one in found if one.question != KIND)
        moments = share_right(one for one in found if one.question == KIND)
        print(f"  {pruning.method} {pruning.rate}: the demo's {known:.3f}, moments {moments:.3f}", flush=True)


def train(output: Path, cache: Path, clips: int, start_from: Path, minutes: float, seed: int) -> None:
    torch.manual_seed(seed)
    rng, schedule = Random(seed), Schedule(minutes, text_rate=TEXT_RATE)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(start_from, dtype=torch.float32)
    use_uniform_windows(model)
    tokenizer = AutoTokenizer.from_pretrained(start_from)
    writer = PromptWriter(tokenizer)
    seeds = range(TRAINING_SEEDS, TRAINING_SEEDS + clips)
    unseen = range(VALIDATION_SEEDS, VALIDATION_SEEDS + VALIDATED_CLIPS)
    lessons = Lessons([scene_of(each) for each in seeds], cached_clips(cache, seeds), writer, seed)
    unseen_clips = cached_clips(cache, unseen)
    began = time.monotonic()
    teacher = Teacher(model, writer, lessons, clips, rng)
    print(f"encoded {VIEWS * clips} clips and {clips} images, {time.monotonic() - began:.0f} s", flush=True)
    trained = [*model.model.language_model.parameters(), *teacher.slices.parameters()]
    for _ in steps("moments", schedule, trained, optimisers(schedule, [], trained), teacher.loss):
        save_checkpoint(output, model, tokenizer, DEMO)
        validate(model, writer, unseen_clips, unseen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=MOMENTS_MODEL)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/gridsieve-demo"), help="where rendered clips are kept")
    parser.add_argument("--clips", type=int, default=CLIPS)
    parser.add_argument("--from", dest="start_from", type=Path, default=DEMO_MODEL, help="a checkpoint to go on from")
    parser.add_argument("--minutes", type=float, default=52)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train(args.output, args.cache, args.clips, args.start_from, args.minutes, args.seed)


if __name__ == "__main__":
    main()
