"""What pruning the tokens of a resampler costs: trains a tiny MiniCPM-V 4.5, compares: `python -m demo.minicpm`.

A resampler's token is a learned query, not a place. Whether one may be dropped, and by what rule, is measured here:

    evs       the tokens that differ most from those of the same query one group earlier, and the first group
    groups    whole groups, those that differ most on average from the group before, and the first one
    random    any

The tower and the resampler first learn to tell what is where, from all tokens of a group, so that no token is bound to
a place; then all parts learn to answer. The language model begins as the demo's. As in training of the demo model,
tokens are dropped at random at random rates, and by no other rule. The prompt has no markers between groups. Scenes are
those of the demo model with a still background.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2_5_VLForConditionalGeneration, SiglipVisionConfig, SiglipVisionModel

from demo.checkpoint import DEMO, IMAGE_MEAN, IMAGE_STD, make_tokenizer
from demo.clips import FRAMES, SIDE_PX, TRAINING_CLIPS, TRAINING_SEEDS, cached_clips, scene_of
from demo.comparison import Answered, Cell, paired_p, wilson
from demo.drawing import Pixels
from demo.lessons import COLUMNS, DENSE_CLASSES, ROWS, Lessons, dense_labels, still_runs
from demo.model import UNSUPERVISED, Prompt, PromptWriter, answer_logits
from demo.questions import questions_about
from demo.scenes import Scene
from demo.train import DENSE_SHARES, Schedule, optimisers
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import EVS, RANDOM, Pruning, num_kept
from gridsieve.services.encoder.pruning.methods import keep_tokens
from gridsieve.services.encoder.tower.resampler import place_embeddings, time_embeddings
from gridsieve.services.preprocessing.prompt.positions import LinearSpan

PATCH_PX = 14
SIDE = SIDE_PX // PATCH_PX
GROUP_FRAMES = 2
GROUPS = FRAMES // GROUP_FRAMES
QUERIES = 16
GRID = Grid(GROUPS, 1, QUERIES)
WIDTH = DEMO.hidden
TOWER_WIDTH = 96
HEADS = 6
LANGUAGE_MODEL = Path(__file__).parent / "gridsieve-demo"
CLIPS_A_STEP = 12
QUESTIONS_A_CLIP = 8
HIGHEST_RATE = 0.95
RATES = (0.5, 0.75, 0.9)
# Not used in training or validation of any model.
EVALUATION_SEEDS = 7_000_000
# Tenths of a second between frames.
_STEP = 5


class TinyMiniCPM(nn.Module):
    """SigLIP, a resampler over groups of frames, and Qwen2's text model.

    `model.language_model` and `lm_head`: the names that `answer_logits` wants.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tower = SiglipVisionModel(
            SiglipVisionConfig(
                hidden_size=TOWER_WIDTH,
                intermediate_size=256,
                num_hidden_layers=3,
                num_attention_heads=3,
                image_size=SIDE_PX,
                patch_size=PATCH_PX,
                vision_use_head=False,
            )
        )
        self.query = nn.Parameter(torch.randn(QUERIES, WIDTH))
        self.kv_proj = nn.Linear(TOWER_WIDTH, WIDTH, bias=False)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(WIDTH, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.reader = Reader()
        whole = Qwen2_5_VLForConditionalGeneration.from_pretrained(LANGUAGE_MODEL)
        self.language_model = whole.model.language_model
        self.model = nn.Module()
        self.model.language_model = self.language_model
        self.lm_head = whole.lm_head
        places = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE))
        self.register_buffer("places", place_embeddings(places, WIDTH), persistent=False)

    def features(self, frames: Tensor) -> Tensor:
        """Of frames, uint8 [n, 3, H, W]: [n, patches, TOWER_WIDTH]."""
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGE_MEAN, IMAGE_STD))
        found: Tensor = self.tower((frames.float() / 255 - mean) / std).last_hidden_state
        return found

    def tokens(self, features: Tensor, groups: Tensor) -> Tensor:
        """Of groups of frames [n, GROUP_FRAMES, patches, TOWER_WIDTH] with these numbers [n]: [n, QUERIES, WIDTH]."""
        values = self.ln_kv(self.kv_proj(features))
        times = time_embeddings(_STEP * torch.arange(FRAMES), WIDTH).view(GROUPS, GROUP_FRAMES, 1, WIDTH)[groups]
        keys = (values + self.places + times).flatten(1, 2)
        queries = self.ln_q(self.query).expand(len(features), -1, -1)
        attended, _ = self.attn(queries, keys, values.flatten(1, 2), need_weights=False)
        found: Tensor = self.ln_post(attended) @ self.proj
        return found

    def embed(self, clips: Tensor, shown: Sequence[Sequence[int]] | None = None) -> Tensor:
        """The tokens of clips, uint8 [B, FRAMES, 3, H, W]: [B, GROUPS, QUERIES, WIDTH].

        shown: for each group of each clip one whose frames it has; frames are encoded once. None: each its own.
        """
        shown = shown or [range(GROUPS)] * len(clips)
        wanted = [(row, group) for row, groups in enumerate(shown) for group in sorted(set(groups))]
        rows, groups = torch.tensor(wanted).unbind(1)
        frames = clips.unflatten(1, (GROUPS, GROUP_FRAMES))[rows, groups]
        place = {pair: number for number, pair in enumerate(wanted)}
        source = torch.tensor([place[row, group] for row, groups in enumerate(shown) for group in groups])
        features = self.features(frames.flatten(0, 1)).unflatten(0, (len(wanted), GROUP_FRAMES))
        found = self.tokens(features[source], torch.arange(GROUPS).repeat(len(clips)))
        embeds: Tensor = found.unflatten(0, (len(clips), GROUPS))
        return embeds


class Reader(nn.Module):
    """What is at each place of a group of frames, read from all its tokens. Only trains them."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(ROWS * COLUMNS, WIDTH))
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.keys, self.norm = nn.Parameter(torch.randn(QUERIES, WIDTH)), nn.LayerNorm(WIDTH)
        self.told = nn.Linear(WIDTH, sum(DENSE_CLASSES))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [n, QUERIES, WIDTH] to logits [n, ROWS · COLUMNS, classes]."""
        places = self.places.expand(len(tokens), -1, -1)
        read, _ = self.attn(places, tokens + self.keys, tokens, need_weights=False)
        found: Tensor = self.told(self.norm(read))
        return found

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """labels: int64 [n · ROWS · COLUMNS, len(DENSE_CLASSES)]."""
        losses = []
        told = self(tokens).flatten(0, 1).split(DENSE_CLASSES, dim=-1)
        for logits, wanted, share in zip(told, labels.unbind(-1), DENSE_SHARES, strict=True):
            weight = torch.ones(logits.shape[-1])
            weight[0] = 0.3  # most places show no object
            losses.append(share * F.cross_entropy(logits, wanted, weight, ignore_index=UNSUPERVISED))
        return torch.stack(losses).sum()


def keep_groups(embeds: Tensor, count: int) -> Tensor:
    """The tokens of whole groups, `count` of them, int64 [count · QUERIES]; embeds: [GROUPS · QUERIES, D]."""
    groups = F.normalize(embeds.view(GROUPS, QUERIES, -1), dim=-1)
    change = 1 - (groups[1:] * groups[:-1]).sum(-1).mean(-1)
    chosen = torch.cat([torch.zeros(1, dtype=torch.long), 1 + change.topk(count - 1).indices]).sort().values
    return (chosen[:, None] * QUERIES + torch.arange(QUERIES)).flatten()


def keep(embeds: Tensor, rule: str, rate: float, seed: int) -> Tensor:
    """The tokens of a clip that a rule keeps, as many by each: whole groups of QUERIES."""
    count = num_kept(GRID, Pruning(rate, EVS)) // QUERIES
    if rule == "groups":
        return keep_groups(embeds, count)
    exactly = 1 - (count * QUERIES + 0.5) / GRID.tokens
    return keep_tokens(embeds, GRID, Pruning(max(0.0, exactly), rule, seed)).long()


class Trainer:
    """Draws lessons and computes their losses. The seed decides what each step draws; the machine, how many there are.

    grid: the tokens of a clip.
    """

    grid = GRID

    def __init__(self, model: Any, lessons: Lessons, writer: PromptWriter, seed: int) -> None:
        self.model, self.lessons, self.writer, self.rng = model, lessons, writer, Random(seed)
        self.right = 0.0  # share of the answers' tokens of the last step

    def tower_step(self) -> Tensor:
        """Loss of what is where, of single groups."""
        scenes, clips = self.lessons.draw(24)
        chosen = [self.rng.sample(range(GROUPS), 4) for _ in scenes]
        pairs = [clip.unflatten(0, (GROUPS, GROUP_FRAMES))[groups] for clip, groups in zip(clips, chosen, strict=True)]
        labels = torch.cat([dense_labels(scene, groups) for scene, groups in zip(scenes, chosen, strict=True)])
        features = self.model.features(torch.cat(pairs).flatten(0, 1)).unflatten(0, (len(scenes) * 4, GROUP_FRAMES))
        loss: Tensor = self.model.reader.loss(self.model.tokens(features, torch.tensor(chosen).flatten()), labels)
        return loss

    def answer_step(self, progress: float) -> Tensor:
        """Loss of answers at a random rate, and of what is where with decreasing weight."""
        scenes, clips = self.lessons.draw(CLIPS_A_STEP, of_several=CLIPS_A_STEP // 3 if progress < 0.7 else 0)
        rate = round(self.rng.uniform(0, HIGHEST_RATE), 3)
        shown = [still_runs(scene, self.rng) for scene in scenes]
        tokens = self._tokens(clips, shown)
        embeds = tokens.flatten(1, 2)
        labels = torch.cat([dense_labels(scene, of) for scene, of in zip(scenes, shown, strict=True)])
        prunings = [Pruning(rate, RANDOM, self.rng.randrange(2**31)) for _ in scenes]
        kept = torch.stack([keep_tokens(clip, self.grid, each) for clip, each in zip(embeds, prunings, strict=True)])
        logits, told = self._answers(embeds, kept.long(), scenes)
        asked = told != UNSUPERVISED
        self.right = float((logits.argmax(-1) == told)[asked].float().mean())
        dense = (0.3 - 0.25 * progress) * self._dense_loss(tokens, labels)
        return F.cross_entropy(logits[asked], told[asked]) + dense

    def _tokens(self, clips: Tensor, shown: Sequence[Sequence[int]]) -> Tensor:
        """[B, grid.t, tokens of a slice, D]. shown: for each slice of each clip one that looks as it does."""
        tokens: Tensor = self.model.embed(clips, shown)
        return tokens

    def _answers(self, embeds: Tensor, kept: Tensor, scenes: Sequence[Scene]) -> tuple[Tensor, Tensor]:
        """Logits and labels of questions about scenes, by the kept tokens of their clips."""
        prompts = [self.lessons.ask(scene, QUESTIONS_A_CLIP) for scene in scenes]
        return answer_logits(self.model, embeds, kept, LinearSpan(GRID.tokens), prompts, self.writer.vision_end)

    def _dense_loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Of what is where."""
        loss: Tensor = self.model.reader.loss(tokens.flatten(0, 1), labels)
        return loss


def train(model: Any, trainer: Trainer, schedule: Schedule) -> None:
    """Trains for `schedule.minutes`, and prints the loss every half minute.

    model: with a `language_model`, which has a learning rate of its own.
    """
    text = list(model.language_model.parameters())
    vision = [value for value in model.parameters() if all(value is not each for each in text)]
    steppers = optimisers(schedule, vision, text)
    started, shown_s, progress, step = time.monotonic(), 0.0, 0.0, 0
    losses: list[float] = []
    while progress < 1:
        loss = trainer.tower_step() if progress < schedule.tower_only else trainer.answer_step(progress)
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        elapsed_s = time.monotonic() - started
        progress, step = elapsed_s / (60 * schedule.minutes), step + 1
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = group["peak"] * schedule.learning_share(progress)
            stepper.step()
        losses.append(loss.item())
        if elapsed_s - shown_s > 30:
            shown_s = elapsed_s
            mean = sum(losses) / len(losses)
            print(f"{progress:5.1%} step {step} loss {mean:.3f} right {trainer.right:.1%}", flush=True)
            losses.clear()


@torch.no_grad()
def compare(model: TinyMiniCPM, writer: PromptWriter, clips: Pixels, seeds: Sequence[int]) -> list[Cell]:
    """The answers to all questions about all clips, unpruned and by each rule at each rate."""
    wanted = [(0.0, "none"), *((rate, rule) for rate in RATES for rule in (EVS, "groups", RANDOM))]
    found: dict[tuple[float, str], list[Answered]] = {each: [] for each in wanted}
    for index, seed in enumerate(seeds):
        scene = scene_of(seed)
        questions = questions_about(scene, Random(seed))
        branches = tuple(writer.branch(question.text, question.answer) for question in questions)
        embeds = model.embed(torch.from_numpy(clips[index : index + 1].copy())).flatten(1, 2)
        for rate, rule in wanted:
            kept = keep(embeds[0], rule, rate, seed) if rate else torch.arange(GRID.tokens)
            logits, labels = answer_logits(
                model,
                embeds,
                kept[None],
                LinearSpan(GRID.tokens),
                [Prompt(writer.before(), branches)],
                writer.vision_end,
            )
            wrong = (logits.argmax(-1) != labels) & (labels != UNSUPERVISED)
            at = 1  # logits begin one position before the first branch
            for question, branch in zip(questions, branches, strict=True):
                right = not wrong[0, at : at + len(branch.ids)].any()
                found[rate, rule].append(Answered(seed, scene.kind, question.kind, len(kept), right))
                at += len(branch.ids)
    return [Cell(rate, rule, tuple(answers)) for (rate, rule), answers in found.items()]


def table(cells: Sequence[Cell]) -> str:
    """Markdown."""
    lines = [
        "| rate | rule | tokens | exact match, Wilson's 95 % interval | difference to random, points (p) |",
        "|---|---|---|---|---|",
    ]
    for cell in cells:
        low, high = wilson(cell.share, len(cell.answers))
        other = next((each for each in cells if (each.rate, each.method) == (cell.rate, RANDOM)), cell)
        against = "" if other is cell else f"{100 * (cell.share - other.share):+.1f} ({paired_p(cell, other):.4f})"
        lines.append(
            f"| {cell.rate:g} | {cell.method} | {cell.tokens:.0f} | {cell.share:.1%} ({low:.1%} to {high:.1%}) "
            f"| {against} |"
        )
    return "\n".join(lines)


def of_kinds(seeds: Sequence[int], clips: Pixels, wanted: Callable[[Scene], bool]) -> tuple[list[int], Pixels]:
    """The seeds and clips of some scenes."""
    places = [place for place, seed in enumerate(seeds) if wanted(scene_of(seed))]
    return [seeds[place] for place in places], clips[places]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/gridsieve-demo"))
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clips", type=int, default=TRAINING_CLIPS)
    parser.add_argument(
        "--evaluate", type=int, default=600, help="clips of all kinds, of which the still ones are used"
    )
    parser.add_argument("--weights", type=Path, help="compare with these instead of training; written otherwise")
    args = parser.parse_args()
    torch.manual_seed(0)
    model, writer = TinyMiniCPM(), PromptWriter(make_tokenizer(DEMO))
    workers = os.cpu_count() or 1
    if args.weights and args.weights.exists():
        model.load_state_dict(torch.load(args.weights))
    else:
        seeds, clips = of_kinds(
            range(TRAINING_SEEDS, TRAINING_SEEDS + args.clips),
            cached_clips(args.cache, range(TRAINING_SEEDS, TRAINING_SEEDS + args.clips), workers),
            is_still,
        )
        lessons = Lessons([scene_of(seed) for seed in seeds], clips, writer, 0)
        train(model, Trainer(model, lessons, writer, 0), Schedule(args.minutes, tower_only=0.25, text_rate=4e-4))
        if args.weights:
            torch.save(model.state_dict(), args.weights)
    unseen = range(EVALUATION_SEEDS, EVALUATION_SEEDS + args.evaluate)
    chosen, clips = of_kinds(unseen, cached_clips(args.cache, unseen, workers), is_still)
    print(table(compare(model.eval(), writer, clips, chosen)))


def is_still(scene: Scene) -> bool:
    return scene.kind in ("still", "several", "small", "wall")


if __name__ == "__main__":
    main()
