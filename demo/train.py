"""Trains the demo model from random weights on one machine without a GPU: `python -m demo.train`.

Both stages use H.264 clips with random augmentation (`demo.augment`). First the vision tower alone learns to predict,
for each token, which object covers it and how that moves. Then tower and language model learn together to answer, with
the services' code for positions and pruning, at random rates. The schedule follows the wall clock, so that training
ends on time. After each validation, the best weights so far are saved to the output folder.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from common.contract.plan import Grid
from common.contract.retention import EVS, RANDOM, Pruning
from demo.checkpoint import DEMO, make_config, make_tokenizer, randomise, save_checkpoint
from demo.clips import FRAMES, TRAINING_SEEDS, VALIDATION_SEEDS, cached_clips
from demo.exact_match import exact_match, share_right
from demo.lessons import COLUMNS, DENSE_CLASSES, ROWS, Lessons, dense_labels, moving_slices, still_runs
from demo.model import TIME_STEP, UNSUPERVISED, Prompt, PromptWriter, answer_logits, embed, prune, use_uniform_windows
from demo.scenes import Pixels, Scene, random_scene

SLICES = FRAMES // 2
VIDEO = Grid(SLICES, ROWS, COLUMNS)
PICTURE = Grid(1, ROWS, COLUMNS)
CLIPS_A_STEP = 8
QUESTIONS_A_CLIP = 10
SLICES_A_STEP = 96
RANDOM_DROPPING_SHARE = 0.2
# Noise added to copies of a still slice, relative to the norm of its tokens.
COPY_NOISE = 0.01
# Weights of colour, shape and motion; shapes are the hardest to learn.
DENSE_SHARES = (1.0, 3.0, 1.0)
VALIDATION_CLIPS = 80
VALIDATED = (Pruning(0.0), Pruning(0.75), Pruning(0.9), Pruning(0.75, RANDOM), Pruning(0.9, RANDOM))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Fractions of the total time, and peak learning rates."""

    minutes: float
    tower_only: float = 0.08
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
        scenes, clips = self.lessons.draw(SLICES_A_STEP // 4)
        chosen = []
        for scene in scenes:
            moving = moving_slices(scene) or list(range(SLICES))
            chosen.append([self.rng.choice(moving) for _ in range(2)] + self.rng.sample(range(SLICES), 2))
        frames = torch.stack(
            [
                clip[[2 * index + half for index in slices for half in (0, 1)]]
                for clip, slices in zip(clips, chosen, strict=True)
            ]
        )
        labels = torch.stack([dense_labels(scene, slices) for scene, slices in zip(scenes, chosen, strict=True)])
        return self._dense_loss(embed(self.model, frames), labels)

    def answer_step(self, progress: float) -> tuple[Tensor, float]:
        """Loss of answers at a random pruning rate, plus the dense loss with decreasing weight."""
        scenes, clips = self.lessons.draw(CLIPS_A_STEP)
        embeds, dense = self._clip_embeds(scenes, clips)
        kept = prune(embeds, VIDEO, self._pruning(progress))
        prompts = [self.lessons.ask(scene, QUESTIONS_A_CLIP) for scene in scenes]
        loss, right = self._answer_loss(embeds, kept, VIDEO, TIME_STEP, prompts)
        return loss + (0.3 - 0.25 * progress) * dense, right

    def picture_step(self) -> tuple[Tensor, float]:
        """Loss of answers about single frames, as images."""
        scenes, clips = self.lessons.draw(2 * CLIPS_A_STEP)
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

    def _pruning(self, progress: float) -> Pruning:
        """High rates first: a step costs a third, and the tokens that the answer depends on are a larger fraction."""
        if self.rng.random() < 0.1 + 0.1 * progress:
            return Pruning(0.0)
        method = RANDOM if self.rng.random() < RANDOM_DROPPING_SHARE * min(1.0, 2 * progress) else EVS
        lowest = 0.7 if self.rng.random() < 0.8 - 0.5 * progress else 0.1
        return Pruning(round(self.rng.uniform(lowest, 0.95), 3), method, self.rng.randrange(2**31))

    def _answer_loss(
        self, embeds: Tensor, kept: Tensor, grid: Grid, time_step: Fraction, prompts: list[Prompt]
    ) -> tuple[Tensor, float]:
        logits, labels = answer_logits(self.model, embeds, kept, grid, time_step, prompts, self.writer.vision_end)
        asked = labels != UNSUPERVISED
        logits, labels = logits[asked], labels[asked]
        right = (logits.argmax(-1) == labels).float().mean().item()
        return F.cross_entropy(logits, labels), right

    def _dense_loss(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, float]:
        losses, rights = [], []
        told = self.dense(tokens.flatten(0, -2)).split(DENSE_CLASSES, dim=-1)
        for logits, wanted, share in zip(told, labels.view(-1, 3).unbind(-1), DENSE_SHARES, strict=True):
            # Most tokens show no object.
            weight = torch.ones(logits.shape[-1])
            weight[0] = 0.3
            losses.append(share * F.cross_entropy(logits, wanted, weight, ignore_index=UNSUPERVISED))
            covered = wanted > 0
            rights.append((logits.argmax(-1) == wanted)[covered].float().mean().item())
        return torch.stack(losses).sum(), min(rights)


def train(output: Path, cache: Path, schedule: Schedule, clips: int, start_from: Path | None, seed: int) -> None:
    # With a second thread, every barrier waits whenever another process runs on this machine.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer, model = _model(start_from, seed)
    writer = PromptWriter(tokenizer)
    scenes = [random_scene(TRAINING_SEEDS + index) for index in range(clips)]
    frames = cached_clips(cache, range(TRAINING_SEEDS, TRAINING_SEEDS + clips), workers=2)
    unseen = cached_clips(cache, range(VALIDATION_SEEDS, VALIDATION_SEEDS + VALIDATION_CLIPS), workers=2)
    trainer = Trainer(model, Lessons(scenes, frames, writer, seed), writer, seed)
    tower = [*model.model.visual.parameters(), *trainer.dense.parameters()]
    text = list(model.model.language_model.parameters())
    groups = [{"params": tower, "peak": schedule.tower_rate}, {"params": text, "peak": schedule.text_rate}]
    optimiser = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    best, step, validated_s, shown_s = 0.0, 0, 0.0, 0.0
    losses: list[float] = []
    rights: list[float] = []
    while (elapsed_s := time.monotonic() - started) < schedule.minutes * 60:
        progress = elapsed_s / (schedule.minutes * 60)
        if progress < schedule.tower_only and start_from is None:
            loss, right = trainer.tower_step()
        elif step % 12 == 0:
            loss, right = trainer.picture_step()
        else:
            loss, right = trainer.answer_step(progress)
        for group in optimiser.param_groups:
            group["lr"] = group["peak"] * schedule.learning_share(progress)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*tower, *text], 1.0)
        optimiser.step()
        step += 1
        losses.append(loss.item())
        rights.append(right)
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
        if elapsed_s - validated_s > 300 and progress > 0.14:
            validated_s = elapsed_s
            best = _keep_best(best, _validate(model, writer, unseen), output, model, tokenizer)
    _keep_best(best, _validate(model, writer, unseen), output, model, tokenizer)


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
    """Mean exact match over the rates with EVS; prints all measurements."""
    model.eval()
    seeds = range(VALIDATION_SEEDS, VALIDATION_SEEDS + VALIDATION_CLIPS)
    found = exact_match(model, writer, clips, seeds, VALIDATED)
    model.train()
    for pruning, counts in found.items():
        kinds = ", ".join(f"{kind} {right / asked:.2f}" for kind, (right, asked) in sorted(counts.items()))
        print(f"  {pruning.method} {pruning.rate}: exact match {share_right(counts):.3f} ({kinds})", flush=True)
    return _mean([share_right(counts) for pruning, counts in found.items() if pruning.method == EVS])


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument(
        "--cache", type=Path, default=Path("/tmp/framesieve-demo"), help="where rendered clips are kept"
    )
    parser.add_argument("--minutes", type=float, default=100)
    parser.add_argument("--clips", type=int, default=3000)
    parser.add_argument("--from", dest="start_from", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train(args.output, args.cache, Schedule(args.minutes), args.clips, args.start_from, args.seed)


if __name__ == "__main__":
    main()
