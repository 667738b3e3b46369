"""What pruning costs a MiniCPM-V 4.6: trains a tiny one, compares methods: `python -m demo.minicpmv4_6`.

Its tower merges 2 × 2 patches after its first layer and 2 × 2 of these at the end: a token is a square of one frame. A
video has a frame a second. Three of the four layers of its text keep a recurrent state, which knows no positions; the
last one attends, by one-dimensional positions. The tower first learns to tell what is where, then all parts learn to
answer, with tokens dropped at random at random rates, and by no other rule. Scenes are those of the demo model with a
still background. Embeddings and MLPs of the text begin as the demo's.

The tower is the encoder's own: after a method before the tower it computes the kept tokens alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MiniCPMV4_6Config, MiniCPMV4_6ForConditionalGeneration, Qwen2_5_VLForConditionalGeneration

from demo.checkpoint import DEMO, IMAGE_MEAN, IMAGE_STD, make_tokenizer, randomise
from demo.clips import SIDE_PX, TRAINING_CLIPS, TRAINING_SEEDS, cached_clips, scene_of
from demo.comparison import Answered, Cell
from demo.drawing import Pixels
from demo.evaluate import GRID, pruning_at
from demo.lessons import COLUMNS, DENSE_CLASSES, ROWS, Lessons, dense_labels
from demo.minicpm import EVALUATION_SEEDS, LANGUAGE_MODEL, QUESTIONS_A_CLIP, RATES, Trainer, is_still, table, train
from demo.model import UNSUPERVISED, Prompt, PromptWriter
from demo.questions import questions_about
from demo.scenes import Scene
from demo.train import DENSE_SHARES, Schedule
from gridsieve.common.contract.retention import (
    AUTO_THRESHOLD,
    EVS,
    EVS_CAUSAL,
    PIXEL_CHANGE,
    RANDOM,
    VCAST,
    VIDCOM2,
    Pruning,
    num_kept,
)
from gridsieve.services.encoder.families.minicpmv4_6 import VisionModel
from gridsieve.services.encoder.pruning.methods import keep_tokens
from gridsieve.services.encoder.tower.attention import VARLEN, attend_by_length
from gridsieve.services.encoder.tower.packing import Side, TowerShape, lay_out
from gridsieve.services.preprocessing.pruning.change import block_means, change
from gridsieve.services.preprocessing.pruning.pixel_change import keep

PATCH_PX, MERGE = 7, 4
SIDE = SIDE_PX // PATCH_PX
TOKEN_PX = PATCH_PX * MERGE
SHAPE = TowerShape(MERGE, cell_side=SIDE, cells_by_quotient=True)
TEXT = {
    "model_type": "qwen3_5_text",
    "hidden_size": DEMO.hidden,
    "intermediate_size": DEMO.intermediate,
    "num_hidden_layers": DEMO.layers,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": DEMO.rope_theta,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
    },
    "tie_word_embeddings": True,
}
VISION = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": SIDE_PX,
    "patch_size": PATCH_PX,
}
# Logarithms of how fast the states' heads forget: they remember from one token to hundreds.
DECAYS = (-6.0, 1.0)
# Of the convolutions' taps, and of what tells a patch its place, at the beginning.
TAPS_STD, PLACES_STD = 0.3, 0.3
CLIPS_AT_ONCE = 6
METHODS = (EVS, EVS_CAUSAL, VIDCOM2, VCAST, PIXEL_CHANGE, RANDOM)
# One frame shows colour, shape and place, but no motion: these labels of `dense_labels`.
SHOWN = (0, 1, 3)


class TinyMiniCPM(nn.Module):
    """language_model, lm_head: transformers'. tower: the encoder's, with a patch embedding that learns."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        config = MiniCPMV4_6Config(
            text_config={**TEXT, "vocab_size": vocab_size},
            vision_config=VISION,
            insert_layer_id=0,
            image_token_id=0,
            video_token_id=1,
            tie_word_embeddings=True,
        )
        whole: Any = MiniCPMV4_6ForConditionalGeneration(config)
        randomise(whole, DEMO.init_range, seed=0)
        self.language_model = whole.model.language_model
        self.lm_head = whole.lm_head
        self.tower = VisionModel(config, windows=True)
        config.vision_config._attn_implementation_internal = VARLEN
        randomise(self.tower, DEMO.init_range, seed=1)
        self.tower.embed_with(nn.Linear(3 * PATCH_PX**2, VISION["hidden_size"]))
        nn.init.normal_(self.tower.places, std=PLACES_STD)
        self.told = nn.Linear(DEMO.hidden, sum(DENSE_CLASSES[each] for each in SHOWN))
        self._begin_as_demo()

    @torch.no_grad()
    def _begin_as_demo(self) -> None:
        """transformers' norms multiply by 1 + weight here, except those inside the recurrent layers."""
        for name, value in self.language_model.named_parameters():
            if "norm" in name and "linear_attn" not in name:
                value -= 1.0
            if name.endswith(".A_log"):
                value.copy_(torch.linspace(*DECAYS, len(value)))
            if name.endswith(".conv1d.weight"):
                nn.init.normal_(value, std=TAPS_STD)
        demo = Qwen2_5_VLForConditionalGeneration.from_pretrained(LANGUAGE_MODEL, dtype=torch.float32)
        known: Any = demo.model.language_model
        self.language_model.embed_tokens.load_state_dict(known.embed_tokens.state_dict())
        for mine, theirs in zip(self.language_model.layers, known.layers, strict=True):
            mine.mlp.load_state_dict(theirs.mlp.state_dict())

    def tokens(self, frames: Tensor) -> Tensor:
        """Of frames, uint8 [n, 3, H, W]: [n, ROWS · COLUMNS, D]."""
        layout = lay_out([Side(SIDE, SIDE)] * len(frames), SHAPE).map(torch.from_numpy)
        rows: Tensor = self.tower(patches_of(frames).flatten(0, 1), layout, attend_evenly)
        found: Tensor = rows.unflatten(0, (len(frames), -1))
        return found

    def kept_tokens(self, frames: Tensor, kept: Tensor) -> Tensor:
        """The tokens of a clip that were chosen before the tower, which sees these alone: [K, D].

        frames: uint8 [GRID.t, 3, H, W]. kept: int64 [K], increasing.
        """
        of_frames = [(kept[kept // GRID.slice_tokens == index] % GRID.slice_tokens).tolist() for index in range(GRID.t)]
        sides = [Side(SIDE, SIDE, kept=tuple(each)) for each in of_frames if each]
        layout = lay_out(sides, SHAPE).map(torch.from_numpy)
        patches = patches_of(frames).unflatten(1, (-1, MERGE**2)).flatten(0, 1)[kept].flatten(0, 1)
        found: Tensor = self.tower(patches, layout, attend_by_length)
        return found

    def embed(self, clips: Tensor, shown: Sequence[Sequence[int]] | None = None) -> Tensor:
        """The tokens of clips, uint8 [B, GRID.t, 3, H, W]: [B, GRID.t, ROWS · COLUMNS, D].

        shown: for each frame of each clip one that looks as it does; these are encoded once. None: each its own.
        """
        shown = shown or [range(GRID.t)] * len(clips)
        wanted = [(row, frame) for row, frames in enumerate(shown) for frame in sorted(set(frames))]
        rows, frames = torch.tensor(wanted).unbind(1)
        place = {pair: number for number, pair in enumerate(wanted)}
        source = torch.tensor([[place[row, frame] for frame in frames] for row, frames in enumerate(shown)])
        return self.tokens(clips[rows, frames])[source]

    def dense_loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """tokens: [..., D]. labels: int64 [n, len(DENSE_CLASSES)], one for each token."""
        classes = [DENSE_CLASSES[each] for each in SHOWN]
        losses = []
        for logits, each in zip(self.told(tokens.flatten(0, -2)).split(classes, dim=-1), SHOWN, strict=True):
            weight = torch.ones(logits.shape[-1])
            weight[0] = 0.3  # most tokens show no object
            own = F.cross_entropy(logits, labels[:, each], weight, ignore_index=UNSUPERVISED)
            losses.append(DENSE_SHARES[each] * own)
        return torch.stack(losses).sum()


def patches_of(frames: Tensor) -> Tensor:
    """Normalised patches of uint8 [n, 3, H, W], those of a token together: [n, patches, 3 · PATCH_PX²]."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGE_MEAN, IMAGE_STD))
    pixels = (frames.float() / 255 - mean) / std
    cut = pixels.reshape(len(frames), 3, ROWS, MERGE, PATCH_PX, COLUMNS, MERGE, PATCH_PX)
    return cut.permute(0, 2, 5, 3, 6, 1, 4, 7).flatten(1, 4).flatten(2)


def attend_evenly(query: Tensor, key: Tensor, value: Tensor, *bounds: Any) -> Tensor:
    """An `Attend` for frames of one size, which has gradients."""
    length = bounds[2]
    parts = (each.unflatten(0, (-1, length)).transpose(1, 2) for each in (query, key, value))
    return F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(0, 1)


class States:
    """What transformers' layers ask of a cache: those of prefixes, or of branches that go on from a prefix each.

    transformers' own copies in place, which has no gradients. before: the states of prefixes. rows: int64 [R], the
    prefix of each branch.
    """

    def __init__(self, before: States | None = None, rows: Tensor | None = None) -> None:
        self._before, self._rows = before, rows
        self._kept: dict[tuple[str, int], Tensor] = {}

    def _earlier(self, kind: str, layer: int) -> Tensor | None:
        return None if self._before is None else self._before._kept[kind, layer][self._rows]

    def _append(self, kind: str, layer: int, new: Tensor, dim: int) -> Tensor:
        earlier = self._earlier(kind, layer)
        return new if earlier is None else torch.cat((earlier, new), dim)

    def get_conv_state(self, layer: int, state_idx: int) -> Tensor | None:
        return self._earlier("inputs", layer)

    def get_recurrent_state(self, layer: int, state_idx: int) -> Tensor | None:
        return self._earlier("matrices", layer)

    def update_conv_state(self, new: Tensor, layer: int, conv_kernel_size: int) -> Tensor:
        found = self._append("inputs", layer, new, -1)
        self._kept["inputs", layer] = found[..., -conv_kernel_size:]
        return found

    def update_recurrent_state(self, new: Tensor, layer: int) -> None:
        self._kept["matrices", layer] = new

    def update(self, keys: Tensor, values: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
        self._kept["keys", layer] = self._append("keys", layer, keys, -2)
        self._kept["values", layer] = self._append("values", layer, values, -2)
        return self._kept["keys", layer], self._kept["values", layer]


def answer_logits(
    model: TinyMiniCPM, media: Tensor, kept: Tensor, prompts: Sequence[Prompt], vision_end: int
) -> tuple[Tensor, Tensor]:
    """The logits at which each branch predicts its answer, and the correct tokens.

        <|im_start|>user [<|vision_start|> tokens of a frame <|vision_end|>] … ─┬─▶ question 1 answer 1
                                                                                └─▶ question 2 answer 2

    media: [B, K, D], kept: int64 [B, K], which tokens of the clip these are. The `before` of all prompts are equal.
    Returns logits [R, L, V] of the R branches of all prompts, and labels int64 [R, L], UNSUPERVISED outside answers.
    """
    *head, start = prompts[0].before
    frame = [start, *[-1] * GRID.slice_tokens, vision_end]
    ids = torch.tensor([*head, *frame * GRID.t])
    places = (ids < 0).nonzero().flatten()
    there = (ids >= 0).repeat(len(prompts), 1)
    there[torch.arange(len(prompts))[:, None], places[kept]] = True
    positions = there.nonzero()[:, 1].view(len(prompts), -1)
    inputs = model.language_model.embed_tokens(ids.clamp(min=0))[positions]
    inputs = inputs.masked_scatter((ids[positions] < 0)[..., None], media)
    prefix = States()
    masks: dict[str, Tensor | None] = {"linear_attention": None, "full_attention": None}
    model.language_model(inputs_embeds=inputs, position_ids=positions, cache=prefix, attention_mask=masks)
    branches = [(row, branch) for row, prompt in enumerate(prompts) for branch in prompt.branches]
    longest = max(len(branch.ids) for _, branch in branches)
    asked = torch.full((len(branches), longest), vision_end)
    labels = torch.full((len(branches), longest), UNSUPERVISED)
    for number, (_, branch) in enumerate(branches):
        asked[number, : len(branch.ids)] = torch.tensor(branch.ids)
        labels[number, branch.answer_at - 1 : len(branch.ids) - 1] = torch.tensor(branch.ids[branch.answer_at :])
    seen = torch.ones(longest, inputs.shape[1] + longest, dtype=torch.bool).tril(inputs.shape[1])
    states = model.language_model(
        inputs_embeds=model.language_model.embed_tokens(asked),
        position_ids=(len(ids) + torch.arange(longest)).expand(len(branches), -1),
        cache=States(prefix, torch.tensor([row for row, _ in branches])),
        attention_mask={"linear_attention": None, "full_attention": seen[None, None]},
    ).last_hidden_state
    return model.lm_head(states), labels


class FrameTrainer(Trainer):
    """Of a model whose tokens are places in single frames."""

    grid = GRID

    def tower_step(self) -> Tensor:
        """Loss of what is where, of single frames."""
        scenes, clips = self.lessons.draw(24)
        chosen = [self.rng.sample(range(GRID.t), 4) for _ in scenes]
        frames = torch.cat([clip[::2][shown] for clip, shown in zip(clips, chosen, strict=True)])
        labels = torch.cat([dense_labels(scene, shown) for scene, shown in zip(scenes, chosen, strict=True)])
        return self._dense_loss(self.model.tokens(frames), labels)

    def _tokens(self, clips: Tensor, shown: Sequence[Sequence[int]]) -> Tensor:
        """Of every second frame."""
        tokens: Tensor = self.model.embed(clips[:, ::2], shown)
        return tokens

    def _answers(self, embeds: Tensor, kept: Tensor, scenes: Sequence[Scene]) -> tuple[Tensor, Tensor]:
        """Without a system prompt, so that all prompts begin alike."""
        media = embeds[torch.arange(len(embeds))[:, None], kept]
        every = [questions_about(scene, self.rng) for scene in scenes]
        prompts = [self.lessons.prompt(self.rng.sample(each, min(QUESTIONS_A_CLIP, len(each)))) for each in every]
        return answer_logits(self.model, media, kept, prompts, self.writer.vision_end)

    def _dense_loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model.dense_loss(tokens, labels)
        return loss


def changes_of(frames: Tensor) -> np.ndarray:
    """The change of each token's pixels since the frame before, float32 [GRID.tokens]; +∞ in the first frame.

    frames: uint8 [GRID.t, 3, H, W].
    """
    means = [block_means(frame.permute(1, 2, 0)[None].numpy(), TOKEN_PX) for frame in frames]
    later = [change(mean, before) for before, mean in pairwise(means)]
    return np.concatenate([np.full(GRID.slice_tokens, np.inf, np.float32), *later])


def choose(model: TinyMiniCPM, frames: Tensor, embeds: Tensor, pruning: Pruning) -> tuple[Tensor, Tensor]:
    """The embeddings that a method keeps of a clip [K, D], and which tokens these are, int64 [K]."""
    if pruning.method != PIXEL_CHANGE:
        kept = keep_tokens(embeds, GRID, pruning).long()
        return embeds[kept], kept
    chosen = keep(changes_of(frames), GRID, num_kept(GRID, pruning), AUTO_THRESHOLD)
    kept = torch.from_numpy(chosen).long()
    return model.kept_tokens(frames, kept), kept


@torch.no_grad()
def compare(model: TinyMiniCPM, writer: PromptWriter, clips: Pixels, seeds: Sequence[int]) -> list[Cell]:
    """The answers to all questions about all clips, unpruned and by each method at each rate."""
    wanted = [(0.0, "none", Pruning(0.0))]
    wanted += [(rate, method, pruning_at(rate, method)) for rate in RATES for method in METHODS]
    found: list[list[Answered]] = [[] for _ in wanted]
    for start in range(0, len(seeds), CLIPS_AT_ONCE):
        own = seeds[start : start + CLIPS_AT_ONCE]
        scenes = [scene_of(seed) for seed in own]
        questions = [questions_about(scene, Random(scene.seed)) for scene in scenes]
        prompts = [
            Prompt(writer.before(), tuple(writer.branch(each.text, each.answer) for each in asked))
            for asked in questions
        ]
        shown = torch.from_numpy(clips[start : start + CLIPS_AT_ONCE, ::2].copy())
        embeds = model.embed(shown).flatten(1, 2)
        for answers, (_, _, pruning) in zip(found, wanted, strict=True):
            hows = [Pruning(pruning.rate, pruning.method, seed if pruning.method == RANDOM else None) for seed in own]
            pairs = [choose(model, *each) for each in zip(shown, embeds, hows, strict=True)]
            media, kept = (torch.stack(each) for each in zip(*pairs, strict=True))
            logits, labels = answer_logits(model, media, kept, prompts, writer.vision_end)
            right = ((logits.argmax(-1) == labels) | (labels == UNSUPERVISED)).all(-1).tolist()
            flat = [(scene, question) for scene, asked in zip(scenes, questions, strict=True) for question in asked]
            answers += [
                Answered(scene.seed, scene.kind, question.kind, kept.shape[1], each)
                for (scene, question), each in zip(flat, right, strict=True)
            ]
    return [Cell(rate, method, tuple(answers)) for (rate, method, _), answers in zip(wanted, found, strict=True)]


def still_clips(cache: Path, first: int, count: int) -> tuple[list[int], Pixels]:
    """The seeds from `first` on whose background is still, of `count`, and their clips."""
    seeds = [seed for seed in range(first, first + count) if is_still(scene_of(seed))]
    return seeds, cached_clips(cache, seeds, os.cpu_count() or 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/gridsieve-demo"))
    parser.add_argument("--minutes", type=float, default=45)
    parser.add_argument("--clips", type=int, default=TRAINING_CLIPS)
    parser.add_argument(
        "--evaluate", type=int, default=600, help="clips of all kinds, of which the still ones are used"
    )
    parser.add_argument("--weights", type=Path, help="compare with these instead of training; written otherwise")
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = make_tokenizer(DEMO)
    model, writer = TinyMiniCPM(len(tokenizer)), PromptWriter(tokenizer)
    if args.weights and args.weights.exists():
        model.load_state_dict(torch.load(args.weights))
    else:
        seeds, clips = still_clips(args.cache, TRAINING_SEEDS, args.clips)
        lessons = Lessons([scene_of(seed) for seed in seeds], clips, writer, 0)
        train(model, FrameTrainer(model, lessons, writer, 0), Schedule(args.minutes, tower_only=0.15))
        if args.weights:
            torch.save(model.state_dict(), args.weights)
    seeds, clips = still_clips(args.cache, EVALUATION_SEEDS, args.evaluate)
    print(table(compare(model.eval(), writer, clips, seeds)))


if __name__ == "__main__":
    main()
