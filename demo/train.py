"""Trains the demo model from random weights on one machine without a GPU: `python -m demo.train`.

All stages use H.264 clips with random augmentation (`demo.augment`). First the vision tower alone learns to predict,
for each token, which object covers it and how that moves. Then tower and language model learn together to answer.
Tokens are dropped uniformly at random, at rates drawn uniformly, and by no other method: the model has seen gaps, and
has no idea which tokens a pruning method would keep. Two processes compute gradients of different clips. The schedule
follows the wall clock, so that training ends on time. After each validation, the best weights so far are saved.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from demo.checkpoint import DEMO, make_config, make_tokenizer, randomise, save_checkpoint
from demo.clips import (
    FRAMES,
    TRAINING_CLIPS,
    TRAINING_SEEDS,
    VALIDATION_CLIPS,
    VALIDATION_SEEDS,
    cached_clips,
    scene_of,
)
from demo.drawing import Pixels
from demo.exact_match import exact_match, share_right
from demo.lessons import COLUMNS, DENSE_CLASSES, ROWS, Lessons, dense_labels, moving_slices, still_runs
from demo.model import TIME_STEP, UNSUPERVISED, Prompt, PromptWriter, answer_logits, embed, use_uniform_windows
from demo.muon import Muon
from demo.scenes import KINDS, Scene
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import RANDOM, ItemPruning
from gridsieve.services.encoder.pruning.methods import keep_tokens
from gridsieve.services.preprocessing.prompt.positions import GridSpan

SLICES = FRAMES // 2
VIDEO = Grid(SLICES, ROWS, COLUMNS)
PICTURE = Grid(1, ROWS, COLUMNS)
# In each process.
CLIPS_A_STEP = 8
QUESTIONS_A_CLIP = 10
# Clips of a step with several movers, at first and at the end. With as many as there are of these, 30 %, the model
# answered for any of the movers, and did not learn to look for the one in question.
CLIPS_OF_SEVERAL = (5, 2)
SLICES_A_STEP = 96
HIGHEST_RATE = 0.95
# Sides of the matrices that Muon trains: embeddings are longer, heads shorter.
MUON_SIDES = (64, 512)
# Learning rates of Muon beside AdamW's. With 1, accuracy after 20 minutes was 46 %, with 2.5 it was 64 %.
MUON_SCALE = 2.5
# Noise added to copies of a still slice, relative to the norm of its tokens.
COPY_NOISE = 0.01
# Weights of colour, shape, motion and place; shapes are the hardest to learn.
DENSE_SHARES = (1.0, 3.0, 1.0, 1.0)
VALIDATED = (ItemPruning(0.0), ItemPruning(0.75, RANDOM))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Fractions of the total time, and peak learning rates."""

    minutes: float
    tower_only: float = 0.14
    warm_up: float = 0.02
    tower_rate: float = 1.2e-3
    text_rate: float = 1.5e-3

    def learning_share(self, progress: float) -> float:
        warm = min(1.0, progress / self.warm_up)
        return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


class Trainer:
    def __init__(self, model: Qwen2_5_VLForConditionalGeneration, lessons: Lessons, writer: PromptWriter, seed: int):
        self.model = model
        self.lessons = lessons
        self.writer = writer
        self.rng = Random(seed)
        self.dense = nn.Linear(DEMO.hidden, sum(DENSE_CLASSES))

    def tower_step(self) -> tuple[Tensor, float]:
        """Dense loss over single slices of many clips; half of the slices show motion, if the clip has any."""
        scenes, chosen, frames = slices_of(self.lessons, self.rng)
        labels = torch.stack([dense_labels(scene, slices) for scene, slices in zip(scenes, chosen, strict=True)])
        return self._dense_loss(embed(self.model, frames), labels)

    def answer_step(self, progress: float) -> tuple[Tensor, float]:
        """Loss of answers at a random pruning rate, plus the dense loss with decreasing weight."""
        scenes, clips = self.lessons.draw(CLIPS_A_STEP, of_several=CLIPS_OF_SEVERAL[progress > 0.7])
        embeds, dense = self._clip_embeds(scenes, clips)
        rate = round(self.rng.uniform(0, HIGHEST_RATE), 3)
        prunings = [ItemPruning(rate, RANDOM, self.rng.randrange(2**31)) for _ in scenes]
        kept = torch.stack([keep_tokens(clip, VIDEO, pruning) for clip, pruning in zip(embeds, prunings, strict=True)])
        kept = kept.long()
        prompts = [self.lessons.ask(scene, QUESTIONS_A_CLIP) for scene in scenes]
        loss, right = self._answer_loss(embeds, kept, VIDEO, TIME_STEP, prompts)
        return loss + (0.3 - 0.25 * progress) * dense, right

    def picture_step(self) -> tuple[Tensor, float]:
        """Loss of answers about single frames, as images."""
        scenes, clips = self.lessons.draw(2 * CLIPS_A_STEP, pictures=True)
        frames = torch.stack([clip[[self.rng.randrange(FRAMES)] * 2] for clip in clips])
        embeds = embed(self.model, frames)
        kept = torch.arange(PICTURE.tokens).expand(len(scenes), -1)
        prompts = [self.lessons.ask(scene, QUESTIONS_A_CLIP // 2, picture=True) for scene in scenes]
        return self._answer_loss(embeds, kept, PICTURE, Fraction(0), prompts)

    def _clip_embeds(self, scenes: list[Scene], clips: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of whole clips [B, t·h·w, D] and their dense loss; runs of still slices are mostly encoded once."""
        whole = self.rng.random() < 0.2
        shown = [list(range(SLICES)) if whole else still_runs(scene, self.rng) for scene in scenes]
        wanted = [(row, index) for row, slices in enumerate(shown) for index in sorted(set(slices))]
        rows = torch.tensor([row for row, _ in wanted])
        indices = torch.tensor([index for _, index in wanted])
        frames = clips.view(len(scenes), SLICES, 2, *clips.shape[2:])[rows, indices]
        encoded = embed(self.model, frames)
        labels = torch.cat(
            [dense_labels(scene, sorted(set(slices))) for scene, slices in zip(scenes, shown, strict=True)]
        )
        dense, _ = self._dense_loss(encoded, labels)
        place = {pair: number for number, pair in enumerate(wanted)}
        source = torch.tensor([[place[row, index] for index in slices] for row, slices in enumerate(shown)])
        embeds = encoded[source]
        if not whole:
            noise = torch.randn_like(embeds) * embeds.detach().square().mean(-1, keepdim=True).sqrt()
            embeds = embeds + COPY_NOISE * noise
        return embeds.flatten(1, 2), dense

    def _answer_loss(
        self, embeds: Tensor, kept: Tensor, grid: Grid, time_step: Fraction, prompts: list[Prompt]
    ) -> tuple[Tensor, float]:
        logits, labels = answer_logits(
            self.model, embeds, kept, GridSpan(grid, time_step), prompts, self.writer.vision_end
        )
        asked = labels != UNSUPERVISED
        logits, labels = logits[asked], labels[asked]
        right = (logits.argmax(-1) == labels).float().mean().item()
        return F.cross_entropy(logits, labels), right

    def _dense_loss(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, float]:
        losses, rights = [], []
        told = self.dense(tokens.flatten(0, -2)).split(DENSE_CLASSES, dim=-1)
        for logits, wanted, share in zip(
            told, labels.view(-1, len(DENSE_CLASSES)).unbind(-1), DENSE_SHARES, strict=True
        ):
            # Most tokens show no object.
            weight = torch.ones(logits.shape[-1])
            weight[0] = 0.3
            losses.append(share * F.cross_entropy(logits, wanted, weight, ignore_index=UNSUPERVISED))
            covered = wanted > 0
            rights.append((logits.argmax(-1) == wanted)[covered].float().mean().item())
        return torch.stack(losses).sum(), min(rights)


def slices_of(lessons: Lessons, rng: Random) -> tuple[list[Scene], list[list[int]], Tensor]:
    """Clips, four slices of each, two of which show motion if the clip has any; and their frames, as of clips."""
    scenes, clips = lessons.draw(SLICES_A_STEP // 4)
    chosen = []
    for scene in scenes:
        moving = moving_slices(scene) or list(range(SLICES))
        chosen.append([rng.choice(moving) for _ in range(2)] + rng.sample(range(SLICES), 2))
    frames = torch.stack(
        [
            clip[[2 * index + half for index in slices for half in (0, 1)]]
            for clip, slices in zip(clips, chosen, strict=True)
        ]
    )
    return scenes, chosen, frames


@dataclass(frozen=True, slots=True)
class Task:
    """What to train from and where to save it. processes: each with one thread and its own clips."""

    output: Path
    cache: Path
    schedule: Schedule
    clips: int
    start_from: Path | None
    seed: int
    processes: int


def train(task: Task) -> None:
    """Render the clips, then train in `task.processes` processes."""
    cached_clips(task.cache, range(TRAINING_SEEDS, TRAINING_SEEDS + task.clips), workers=task.processes)
    cached_clips(task.cache, range(VALIDATION_SEEDS, VALIDATION_SEEDS + VALIDATION_CLIPS), workers=task.processes)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_train, (task, f"file://{folder}/processes"), nprocs=task.processes)


def _train(rank: int, task: Task, meeting: str) -> None:
    # With a second thread, every barrier waits whenever another process runs on this machine.
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=task.processes)
    seed, schedule = task.seed + rank, task.schedule
    torch.manual_seed(seed)
    tokenizer, model = _model(task.start_from, task.seed)
    writer = PromptWriter(tokenizer)
    seeds = range(TRAINING_SEEDS, TRAINING_SEEDS + task.clips)
    frames = cached_clips(task.cache, seeds)
    unseen = cached_clips(task.cache, range(VALIDATION_SEEDS, VALIDATION_SEEDS + VALIDATION_CLIPS))
    trainer = Trainer(model, Lessons([scene_of(each) for each in seeds], frames, writer, seed), writer, seed)
    tower = [*model.model.visual.parameters(), *trainer.dense.parameters()]
    text = list(model.model.language_model.parameters())
    _averaged([parameter.data for parameter in trainer.dense.parameters()], 0.0)
    steppers = optimisers(schedule, tower, text)
    started = time.monotonic()
    best, step, validated_s, shown_s, progress = 0.0, 0, 0.0, 0.0, 0.0
    losses: list[float] = []
    rights: list[float] = []
    while progress < 1:
        if progress < schedule.tower_only and task.start_from is None:
            loss, right = trainer.tower_step()
        elif step % 12 == 0:
            loss, right = trainer.picture_step()
        else:
            loss, right = trainer.answer_step(progress)
        for parameter in (*tower, *text):
            parameter.grad = None
        loss.backward()
        elapsed_s = time.monotonic() - started
        # Equal in all processes, so that they take the same steps.
        gradients = [parameter.grad for parameter in (*tower, *text) if parameter.grad is not None]
        progress = _averaged(gradients, elapsed_s / (schedule.minutes * 60))
        nn.utils.clip_grad_norm_([*tower, *text], 1.0)
        for optimiser in steppers:
            for group in optimiser.param_groups:
                group["lr"] = group["peak"] * schedule.learning_share(progress)
            optimiser.step()
        step += 1
        losses.append(loss.item())
        rights.append(right)
        if rank:
            continue
        if elapsed_s - shown_s > 20:
            shown_s = elapsed_s
            left = schedule.minutes - elapsed_s / 60
            print(
                f"{progress:5.1%} step {step} loss {_mean(losses):.3f} correct tokens {_mean(rights):.3f} "
                f"{elapsed_s / step:.2f} s/step, {left:.0f} min left",
                flush=True,
            )
            losses.clear()
            rights.clear()
        if elapsed_s - validated_s > 600 and progress > 0.14:
            validated_s = elapsed_s
            best = _keep_best(best, _validate(model, writer, unseen), task.output, model, tokenizer)
    if not rank:
        _keep_best(best, _validate(model, writer, unseen), task.output, model, tokenizer)


def optimisers(schedule: Schedule, tower: Sequence[Tensor], text: Sequence[Tensor]) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between layers, AdamW for embeddings, norms and heads."""
    low, high = MUON_SIDES
    matrices: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for parameters, peak in ((tower, schedule.tower_rate), (text, schedule.text_rate)):
        inner = [each for each in parameters if each.ndim == 2 and all(low <= side <= high for side in each.shape)]
        rest = [each for each in parameters if all(each is not one for one in inner)]
        matrices.append({"params": inner, "peak": MUON_SCALE * peak})
        others.append({"params": rest, "peak": peak})
    return [
        Muon(matrices, lr=0.0, weight_decay=0.01),
        torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def _averaged(tensors: Sequence[Tensor], number: float) -> float:
    """Replace tensors by their means over all processes; the mean of `number`."""
    flat = torch.cat([*(tensor.flatten() for tensor in tensors), torch.tensor([number])])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    for tensor, mean in zip(tensors, flat[:-1].split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))
    return flat[-1].item()


def _keep_best(
    best: float,
    score: float,
    output: Path,
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
) -> float:
    if score < best:
        return best
    save_checkpoint(output, model, tokenizer, DEMO)
    print(f"  saved into {output}", flush=True)
    return score


def _model(start_from: Path | None, seed: int) -> tuple[PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration]:
    tokenizer = make_tokenizer(DEMO)
    model = Qwen2_5_VLForConditionalGeneration(make_config(DEMO, tokenizer))
    randomise(model, DEMO.init_range, seed)
    if start_from is not None:
        trained = Qwen2_5_VLForConditionalGeneration.from_pretrained(start_from, dtype=torch.float32)
        model.load_state_dict(trained.state_dict())
    use_uniform_windows(model)
    return tokenizer, model.train()


def _validate(model: Qwen2_5_VLForConditionalGeneration, writer: PromptWriter, clips: Pixels) -> float:
    """Mean exact match over the kinds of scenes, unpruned and dropping at random; prints all measurements."""
    model.eval()
    seeds = range(VALIDATION_SEEDS, VALIDATION_SEEDS + VALIDATION_CLIPS)
    found = exact_match(model, writer, clips, seeds, VALIDATED)
    model.train()
    shares: list[float] = []
    for pruning, judged in found.items():
        by_scene = {kind: share_right(one for one in judged if one.scene == kind) for kind in KINDS}
        asked = sorted({one.question for one in judged})
        by_question = {kind: share_right(one for one in judged if one.question == kind) for kind in asked}
        for shown in (by_scene, by_question):
            kinds = ", ".join(f"{kind} {share:.2f}" for kind, share in shown.items())
            print(f"  {pruning.method} {pruning.rate}: exact match {share_right(judged):.3f} ({kinds})", flush=True)
        shares += by_scene.values()
    return _mean(shares)


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "gridsieve-demo")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/gridsieve-demo"), help="where rendered clips are kept")
    parser.add_argument("--minutes", type=float, default=92)
    parser.add_argument("--clips", type=int, default=TRAINING_CLIPS)
    parser.add_argument("--from", dest="start_from", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    schedule = Schedule(args.minutes)
    train(Task(args.output, args.cache, schedule, args.clips, args.start_from, args.seed, args.processes))


if __name__ == "__main__":
    main()
