"""Trains the EAGLE-3 head that drafts tokens for the demo model: `python -m demo.draft`.

The demo model is the teacher. It reads correct answers about augmented clips of which tokens are dropped at random, at
rates drawn uniformly; the head learns its distribution of the token after the next, for every token of an answer. As
drafting continues from the head's own output, so does training, DEPTH tokens ahead:

    row                      i−2    i−1     i        `i`: [ embedding of token i + 1 | states of token i ]
    ahead 0  keys            t      t       t        t: of the teacher's hidden states
    ahead 1  keys of row i   t      t       o        o: of the head's output for the row before, one token ahead less
    ahead 2  keys of row i   t      o       o

The weights are those of `Eagle3Head`, which generation loads. The same seed gives the same head.
Source: training-time test, EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from demo.checkpoint import DEMO
from demo.clips import FRAMES, TRAINING_SEEDS, VALIDATION_CLIPS, VALIDATION_SEEDS, cached_clips, scene_of
from demo.flags import training_flags
from demo.lessons import Lessons
from demo.model import (
    TIME_STEP,
    UNSUPERVISED,
    LaidOut,
    Media,
    Prompt,
    PromptWriter,
    embed,
    lay_out,
    seen_by,
    states_of,
    use_uniform_windows,
)
from demo.muon import Muon
from demo.scenes import Scene
from demo.train import HIGHEST_RATE, PICTURE, VIDEO
from gridsieve.common.checkpoint import DEMO_DRAFT, DEMO_MODEL
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import RANDOM, ItemPruning
from gridsieve.services.encoder.pruning.methods import keep_tokens
from gridsieve.services.generation.loading.draft_head import JOINED
from gridsieve.services.generation.model.draft_head import DraftHead
from gridsieve.services.generation.model.eagle3 import Eagle3Head, Eagle3Sizes, Rotary
from gridsieve.services.preprocessing.prompt.positions import GridSpan

CLIPS = 840
# Augmentations of each clip; all are encoded once, before the training.
VIEWS = 2
CLIPS_A_STEP = 6
QUESTIONS_A_CLIP = 10
PICTURES_EVERY = 10
DEPTH = 5
# Weight of a token ahead beside the one before it.
AHEAD_SHARE = 0.85
PEAK_RATE = 2e-3
WARM_UP_STEPS = 100
# The layers whose input is read: the last two, and what the last one gives.
LAYERS = (2, 3, 4)
INTERMEDIATE = 256
EPS = 1e-6
VALIDATED_RATES = (0.0, 0.75)


@dataclass(frozen=True, slots=True)
class Answers:
    """The rows of a batch that draft tokens of answers, padded to M for each clip.

    rows: int64 [B, M], indices of the layout. rank: int64 [B, M], the place within its answer; -1 of padding.
    """

    rows: Tensor
    rank: Tensor

    @classmethod
    def of(cls, laid: LaidOut) -> Answers:
        """Row i drafts token i + 2: the labels of row i + 1. A label follows the last token before an answer, too."""
        labelled = laid.labels != UNSUPERVISED
        drafts = labelled[:, :-2] & labelled[:, 1:-1] & (laid.owner[:, :-2] == laid.owner[:, 1:-1])
        found = [each.nonzero()[:, 0] for each in drafts]
        rows = torch.zeros(len(found), max(map(len, found)), dtype=torch.long)
        rank = torch.full_like(rows, -1)
        for index, each in enumerate(found):
            rows[index, : len(each)] = each
            place = 0
            for column, row in enumerate(each.tolist()):
                place = place + 1 if column and row == int(each[column - 1]) + 1 else 0
                rank[index, column] = place
        return cls(rows, rank)


class Attention:
    """Implements `Batch` for training: rows of B clips, those of the teacher's states first, then the head's own.

    seen: bool [B, T, T], what each row of the layout attends to.
    """

    def __init__(self, seen: Tensor, answers: Answers) -> None:
        self._answers, self._ahead = answers, 0
        self._bias = torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        clips = len(self._answers.rows)
        shared = len(query) // len(key)
        query, key, value = (each.unflatten(1, (clips, -1)).transpose(0, 1) for each in (query, key, value))
        key, value = (each.repeat_interleave(shared, 1) for each in (key, value))  # [B, heads, rows, head_dim]
        self._keys.append(key)
        self._values.append(value)
        if self._ahead == 0:
            attended = F.scaled_dot_product_attention(query, key, value, self._bias[:, None], scale=scaling)
        else:
            attended = self._attend_ahead(query * scaling)
        self._ahead += 1
        return attended.transpose(1, 2).flatten(0, 1)

    def _attend_ahead(self, query: Tensor) -> Tensor:
        """Of the answers' rows: the teacher's keys up to `ahead` rows before, then one of the head's a row."""
        rows, ahead = self._answers.rows, self._ahead
        columns = self._bias.shape[-1]
        bias = self._bias.gather(1, rows[..., None].expand(-1, -1, columns))
        own = torch.arange(columns) > (rows - ahead)[..., None]
        # Rows without so many before them are padding here; they may attend to anything.
        bias = bias.masked_fill(own & (self._answers.rank >= ahead)[..., None], -math.inf)
        scores = [query @ self._keys[0].transpose(-1, -2) + bias[:, None]]
        drafted = [_shifted(each, ahead - number) for number, each in enumerate(self._keys[1:], 1)]
        scores += [(query * each).sum(-1, keepdim=True) for each in drafted]
        shares = torch.cat(scores, dim=-1).softmax(-1)
        found = shares[..., :columns] @ self._values[0]
        for number, each in enumerate(self._values[1:], 1):
            share = shares[..., columns + number - 1, None]
            found = found + share * _shifted(each, ahead - number)
        return found


def _shifted(rows: Tensor, places: int) -> Tensor:
    """Each row replaced by the one so many places before it. rows: [B, heads, M, ..]"""
    return rows.roll(places, dims=2) if places else rows


class Trainer:
    """Trains `head`, of a model with `model.language_model` and `lm_head`.

    vocab: the tokens that the head drafts, in increasing order. scores: of these, from the head's output, [.., vocab].
    media: of a grid, as in `lay_out`. read: the text model's output, as `states_of`.
    """

    def __init__(
        self,
        model: Any,
        writer: PromptWriter,
        head: DraftHead,
        vocab: Sequence[int],
        scores: Callable[[Tensor], Tensor],
        media: Callable[[Grid], Media],
        read: Callable[[Any, LaidOut], Tensor] = states_of,
    ) -> None:
        self._text: Any = model.model.language_model
        self._lm_head, self._vision_end = model.lm_head, writer.vision_end
        self._vocab = torch.tensor(vocab)
        self.head, self._scores, self._media, self._read = head, scores, media, read
        self._states: dict[int, Tensor] = {}
        for layer, module in enumerate([*self._text.layers, self._text.norm]):
            if layer in head.sizes.layers:
                module.register_forward_pre_hook(lambda _, inputs, at=layer: self._states.update({at: inputs[0]}))

    def loss(self, embeds: Tensor, kept: Tensor, grid: Grid, prompts: Sequence[Prompt]) -> tuple[Tensor, list[Tensor]]:
        """The loss; and for each number of tokens ahead, whether the head's token is the teacher's: bool, a flat list
        of the rows that begin a draft, [drafts] each, in which a row without such a token is right."""
        with torch.no_grad():
            media = self._media(grid)
            laid = lay_out(self._text.embed_tokens, embeds, kept, media, prompts, self._vision_end)
            states = self._read(self._text, laid)
            self._states[len(self._text.layers) + 1] = states
            answers = Answers.of(laid)
            told = self._lm_head(_taken(states, answers.rows + 1))
            odds = told[..., self._vocab].softmax(-1)
        # The row of <|vision_end|> reads the first token of the first question, the last row of a question nothing.
        owner = laid.owner.clone()
        owner[:, laid.prefix - 1] = 1
        owner[:, :-1][laid.owner[:, :-1] != laid.owner[:, 1:]] = -1
        owner[:, laid.prefix - 1] = 1
        attention = Attention(seen_by(owner[:, :-1]), answers)
        hidden = self.head.joined([self._states[layer][:, :-1] for layer in self.head.sizes.layers])
        outputs = self._rows(laid.inputs[:, 1:], hidden, laid.positions[..., :-1], attention)
        outputs = _taken(outputs, answers.rows)
        following = _taken(laid.inputs, answers.rows + 1)
        clip = torch.arange(len(answers.rows))[:, None]
        positions = laid.positions[:, clip, answers.rows]
        losses, shares, rights = [], [], []
        for ahead in range(DEPTH):
            if ahead:
                outputs = self._rows(following, outputs.roll(1, dims=1), positions, attention)
            drafts = answers.rank >= ahead
            scores = self._scores(outputs)
            losses.append(F.cross_entropy(scores[drafts], odds[drafts]))
            shares.append(AHEAD_SHARE**ahead)
            right = (self._vocab[scores.argmax(-1)] == told.argmax(-1)) | ~drafts
            # In the row that begins the draft; rows after the end of an answer are of rank 0 or -1.
            rights.append(right.roll(-ahead, dims=1)[answers.rank >= 0])
        total = sum((share * each for share, each in zip(shares, losses, strict=True)), torch.zeros(()))
        return total / sum(shares), rights

    def _rows(self, embeds: Tensor, hidden: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """The head over the rows of all clips: [B, rows, D] each."""
        turns = self.head.turns(positions.flatten(1))
        rows = self.head(embeds.flatten(0, 1), hidden.flatten(0, 1), turns, attention)
        apart: Tensor = rows.view_as(embeds)
        return apart


def save(head: Eagle3Head, vocab: Sequence[int], folder: Path) -> None:
    """As AngelSlim stores heads, in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: parameter.detach().half() for name, parameter in head.named_parameters()}
    sizes = head.sizes
    wide, narrow = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    rows = ([wide, narrow, narrow], [sizes.intermediate] * 2)
    for (joined, names), of_each in zip(JOINED.items(), rows, strict=True):
        weights |= zip(names, weights.pop(joined).split(of_each), strict=True)
    weights = {name.replace("midlayer", "layers.0"): each.contiguous() for name, each in weights.items()}
    weights["d2t"] = torch.tensor(vocab) - torch.arange(len(vocab))
    save_file(weights, folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config_of(sizes), indent=2, sort_keys=True) + "\n")


def make_head(vocab: int) -> Eagle3Head:
    """With random weights."""
    head = Eagle3Head(sizes_of(vocab))
    head.prepare(torch.device("cpu"))
    for name, parameter in head.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.5 / math.sqrt(parameter.shape[1]))
    return head


def _taken(rows: Tensor, at: Tensor) -> Tensor:
    """rows: [B, T, D]; at: int64 [B, M]. Returns [B, M, D]."""
    return rows.gather(1, at[..., None].expand(-1, -1, rows.shape[-1]))


def sizes_of(vocab: int) -> Eagle3Sizes:
    return Eagle3Sizes(
        hidden=DEMO.hidden,
        intermediate=INTERMEDIATE,
        heads=DEMO.heads,
        kv_heads=DEMO.kv_heads,
        head_dim=DEMO.hidden // DEMO.heads,
        vocab=vocab,
        eps=EPS,
        activation="silu",
        rotary=Rotary(DEMO.rope_theta, DEMO.mrope_section),
        layers=LAYERS,
        before_levels=False,
        ahead=False,
        axes=3,
    )


def config_of(sizes: Eagle3Sizes) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "draft_vocab_size": sizes.vocab,
        "eagle_aux_hidden_state_layer_ids": list(sizes.layers),
        "head_dim": sizes.head_dim,
        "hidden_act": sizes.activation,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "model_type": "llama",
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": sizes.kv_heads,
        "rms_norm_eps": sizes.eps,
        "rope_scaling": {"mrope_section": list(sizes.rotary.sections), "type": "mrope"},
        "rope_theta": sizes.rotary.theta,
    }


@dataclass(frozen=True, slots=True)
class Encoded:
    """Scenes, and the tower's tokens of their clips: float16 [n, t·h·w, D]."""

    scenes: list[Scene]
    embeds: Tensor
    grid: Grid


@torch.no_grad()
def encoded(model: Any, lessons: Lessons, clips: int, pictures: Random | None = None) -> Encoded:
    """Augmented clips, or of as many one frame."""
    scenes, parts = list[Scene](), list[Tensor]()
    for _ in range(0, clips, CLIPS_A_STEP):
        drawn, frames = lessons.draw(CLIPS_A_STEP, pictures=pictures is not None)
        if pictures:
            frames = torch.stack([clip[[pictures.randrange(FRAMES)] * 2] for clip in frames])
        scenes += drawn
        parts.append(embed(model, frames).half())
    return Encoded(scenes, torch.cat(parts), PICTURE if pictures else VIDEO)


def batches(video: Encoded, pictures: Encoded, lessons: Lessons, rng: Random) -> Iterator[tuple[Any, ...]]:
    """Arguments of `Trainer.loss`, for ever."""
    step = 0
    while True:
        step += 1
        source = video if step % PICTURES_EVERY else pictures
        chosen = rng.sample(range(len(source.scenes)), CLIPS_A_STEP)
        rate = round(rng.uniform(0, HIGHEST_RATE), 3) if source is video and rng.random() < 0.8 else 0.0
        prompts = [lessons.ask(source.scenes[index], QUESTIONS_A_CLIP, source is pictures) for index in chosen]
        yield *_kept(source, chosen, rate, rng), source.grid, prompts


def _kept(source: Encoded, chosen: Sequence[int], rate: float, rng: Random) -> tuple[Tensor, Tensor]:
    embeds = source.embeds[torch.tensor(chosen)].float()
    prunings = [ItemPruning(rate, RANDOM, rng.randrange(2**31)) for _ in chosen]
    kept = [keep_tokens(clip, source.grid, pruning) for clip, pruning in zip(embeds, prunings, strict=True)]
    return embeds, torch.stack(kept).long()


def vocabulary(lessons: Lessons, video: Encoded, pictures: Encoded) -> list[int]:
    """The tokens of answers, in increasing order."""
    found: set[int] = set()
    for source in (video, pictures):
        for scene in source.scenes:
            for branch in lessons.ask(scene, 1000, source is pictures).branches:
                found.update(branch.ids[branch.answer_at :])
    return sorted(found)


def optimisers(head: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between layers, AdamW for norms and the output."""
    named = dict(head.named_parameters())
    inner = [name for name, each in named.items() if each.ndim == 2 and name != "lm_head.weight"]
    matrices = [{"params": [named[name] for name in inner], "peak": 2 * PEAK_RATE}]
    others = [{"params": [each for name, each in named.items() if name not in inner], "peak": PEAK_RATE}]
    return [
        Muon(matrices, lr=0.0, weight_decay=0.01),
        torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def train(output: Path, cache: Path, clips: int, steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    rng = Random(seed)
    began = time.monotonic()
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    model.train(False).requires_grad_(False)
    use_uniform_windows(model)
    writer = PromptWriter(AutoTokenizer.from_pretrained(DEMO_MODEL))
    seeds = range(TRAINING_SEEDS, TRAINING_SEEDS + clips)
    lessons = Lessons([scene_of(each) for each in seeds], cached_clips(cache, seeds, 2), writer, seed)
    unseen = range(VALIDATION_SEEDS, VALIDATION_SEEDS + VALIDATION_CLIPS // 5)
    video = encoded(model, lessons, VIEWS * clips)
    pictures = encoded(model, lessons, clips, rng)
    print(f"encoded {len(video.scenes)} clips and {len(pictures.scenes)} images, {time.monotonic() - began:.0f} s")
    vocab = vocabulary(lessons, video, pictures)
    head = make_head(len(vocab))
    trainer = Trainer(model, writer, head, vocab, lambda rows: head.lm_head(head.norm(rows)), span_of)
    held_out = unseen_clips(model, writer, unseen, cached_clips(cache, unseen, 2), seed)
    size = sum(each.numel() for each in head.parameters())
    print(f"{len(vocab)} tokens, {size} weights", flush=True)
    steppers, source = optimisers(head), batches(video, pictures, lessons, rng)
    began = shown = time.monotonic()
    losses: list[float] = []
    for step in range(steps):
        loss, _ = trainer.loss(*next(source))
        for parameter in head.parameters():
            parameter.grad = None
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        rate = min(1, step / WARM_UP_STEPS) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for optimiser in steppers:
            for group in optimiser.param_groups:
                group["lr"] = group["peak"] * rate
            optimiser.step()
        losses.append(loss.item())
        now = time.monotonic()
        if now - shown > 30:
            each_s = (now - began) / (step + 1)
            left = (steps - step) * each_s / 60
            print(
                f"step {step} loss {sum(losses) / len(losses):.3f} {each_s:.2f} s/step, {left:.0f} min left", flush=True
            )
            shown = now
            losses.clear()
        if step % 250 == 249 or step == steps - 1:
            validate(trainer, held_out, rng)
            save(head, vocab, output)


def span_of(grid: Grid) -> GridSpan:
    return GridSpan(grid, TIME_STEP if grid.t > 1 else Fraction(0))


def unseen_clips(
    model: Any, writer: PromptWriter, seeds: Sequence[int], clips: Any, seed: int
) -> list[tuple[Encoded, list[Prompt]]]:
    """Clips that no step sees, as they are, with all questions about them; batches of one step's size."""
    scenes = [scene_of(each) for each in seeds]
    lessons, found = Lessons(scenes, clips, writer, seed), []
    for start in range(0, len(scenes), CLIPS_A_STEP):
        with torch.no_grad():
            part = embed(model, torch.from_numpy(clips[start : start + CLIPS_A_STEP].copy())).half()
        some = scenes[start : start + CLIPS_A_STEP]
        found.append((Encoded(some, part, VIDEO), [lessons.ask(scene, 1000) for scene in some]))
    return found


@torch.no_grad()
def validate(trainer: Trainer, held_out: Sequence[tuple[Encoded, list[Prompt]]], rng: Random) -> None:
    """Prints the draft tokens accepted of a step that drafts, of so many at most: answers' ends shorten them."""
    for rate in VALIDATED_RATES:
        told = []
        for source, prompts in held_out:
            embeds, kept = _kept(source, range(len(source.scenes)), rate, rng)
            told.append(torch.stack(trainer.loss(embeds, kept, VIDEO, prompts)[1]))
        right = torch.cat(told, dim=1).float().cumprod(dim=0).mean(dim=1)
        print(f"  rate {rate}: all of the first drafts right " + ", ".join(f"{each:.3f}" for each in right), flush=True)


def main() -> None:
    parser = training_flags(__doc__, DEMO_DRAFT, CLIPS)
    parser.add_argument("--steps", type=int, default=1100)
    args = parser.parse_args()
    train(args.output, args.cache, args.clips, args.steps, args.seed)


if __name__ == "__main__":
    main()
