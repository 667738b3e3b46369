"""Trains an embedder of the demo's line: `python -m demo.embedder`.

The vectors of a clip and of a text are near if the text is true of the clip. The language model of the demo model is
trained on from its weights; its tower stays as it is. A step reads the same slices of several augmented clips, 4 s of
them to all, of which tokens are dropped at random at a rate drawn uniformly, and texts about these slices, true and
false ones. The scenes tell of each clip and each text whether they belong together (`demo.descriptions`), so that no
right answer counts as a wrong one.

The prompts are those of `Embed` (docs/vectors.md): the instruction in a system message, the text or the clip in the
user's message, the generation prompt. The vector is the last token's state after the final norm, normalised.
Source: InfoNCE, arXiv 1807.03748, with several right answers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from demo.checkpoint import DEMO, save_checkpoint
from demo.clips import TRAINING_SEEDS, VALIDATION_SEEDS, cached_clips, scene_of
from demo.descriptions import Description, Event, altered, caption, described, exchanged, first_event, seen_in
from demo.draft import encoded
from demo.flags import training_flags
from demo.lessons import COLUMNS, ROWS, Lessons
from demo.model import TIME_STEP, PromptWriter, embed, use_uniform_windows
from demo.scenes import Scene
from demo.stage import steps
from demo.train import HIGHEST_RATE, SLICES, VIDEO, Schedule, optimisers
from gridsieve.common.checkpoint import DEMO_EMBEDDER, DEMO_MODEL
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import NONE, RANDOM, ItemPruning
from gridsieve.services.encoder.pruning.methods import keep_tokens
from gridsieve.services.preprocessing.prompt.positions import GridSpan, MediaSpan, TextSpan, positions_of

CLIPS, VIEWS, VALIDATED_CLIPS = 600, 3, 60
CLIPS_A_STEP = 24
SHORTEST_SLICES = 4
# The first is that of `Embed`, which half of the prompts have.
INSTRUCTIONS = (
    "Represent the user's input.",
    "Find a video that shows this.",
    "Retrieve videos relevant to the user's query.",
)
HIGHEST_SCALE = 100.0
VALIDATED_RATES = (0.0, 0.75)


class Reader(nn.Module):
    """Makes vectors of texts and of clips, as `Embed` does. scale: what cosines are multiplied by in the loss."""

    def __init__(self, model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.text: Any = model.model.language_model
        self.scale = nn.Parameter(torch.tensor(14.0).log())
        self._tokenizer = tokenizer
        self._start, self._end = (self._ids(each) for each in ("<|vision_start|>", "<|vision_end|>"))
        self._answer = self._ids("<|im_end|>\n<|im_start|>assistant\n")

    def texts(self, texts: Sequence[str], instruction: str) -> Tensor:
        """float32 [M, D], of length 1."""
        cache, begun = self._begun(instruction, len(texts))
        rows = [self._ids(text) + self._answer for text in texts]
        longest = max(map(len, rows))
        ids = torch.tensor([row + self._answer[-1:] * (longest - len(row)) for row in rows])
        positions = torch.arange(begun, begun + longest).expand(3, len(rows), -1)
        last = torch.tensor([len(row) - 1 for row in rows])
        return self._vectors(self.text.embed_tokens(ids), positions, cache, begun, last)

    def clips(self, embeds: Tensor, kept: Tensor, grid: Grid, instruction: str) -> Tensor:
        """embeds: [B, t·h·w, D]; kept: int64 [B, K]. Returns float32 [B, D], of length 1."""
        cache, begun = self._begun(instruction, len(embeds))
        tail = [*self._end, *self._answer]
        spans: list[TextSpan | MediaSpan] = [TextSpan(begun + 1), GridSpan(grid, TIME_STEP), TextSpan(len(tail))]
        full = torch.from_numpy(positions_of(spans)).long()[:, begun:]
        media = embeds.gather(1, kept[..., None].expand(-1, -1, embeds.shape[-1]))
        before, after = (
            self.text.embed_tokens(torch.tensor(ids)).expand(len(embeds), -1, -1) for ids in (self._start, tail)
        )
        positions = torch.cat(
            [
                full[:, None, :1].expand(-1, len(embeds), -1),
                full[:, 1 + kept],
                full[:, None, 1 + grid.tokens :].expand(-1, len(embeds), -1),
            ],
            dim=-1,
        )
        inputs = torch.cat([before, media, after], dim=1)
        last = torch.full((len(embeds),), inputs.shape[1] - 1)
        return self._vectors(inputs, positions, cache, begun, last)

    def _begun(self, instruction: str, rows: int) -> tuple[Any, int]:
        """The keys and values of what all these prompts begin with, and its number of tokens."""
        ids = self._ids(f"<|im_start|>system\n{instruction}<|im_end|>\n<|im_start|>user\n")
        cache = self.text(input_ids=torch.tensor([ids]), use_cache=True).cache
        cache.batch_repeat_interleave(rows)
        return cache, len(ids)

    def _vectors(self, inputs: Tensor, positions: Tensor, cache: Any, begun: int, last: Tensor) -> Tensor:
        tokens = inputs.shape[1]
        seen = torch.ones(tokens, begun + tokens, dtype=torch.bool).tril(begun)
        states = self.text(
            inputs_embeds=inputs,
            position_ids=positions,
            attention_mask={"full_attention": seen[None, None]},
            cache=cache,
            use_cache=True,
        ).last_hidden_state
        return F.normalize(states[torch.arange(len(last)), last], dim=-1)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])


@dataclass(frozen=True, slots=True)
class Part:
    """The same slices of several clips: their tokens [B, t·h·w, D], and what is seen in each."""

    embeds: Tensor
    grid: Grid
    seen: list[tuple[Event, ...]]


def part_of(scenes: Sequence[Scene], embeds: Tensor, rng: Random, clips: int) -> Part:
    """Slices drawn at random, and that many clips of which what these slices show is certain."""
    while True:
        slices = SLICES if rng.random() < 0.4 else rng.randrange(SHORTEST_SLICES, SLICES)
        first = rng.randrange(SLICES - slices + 1)
        drawn = rng.sample(range(len(scenes)), len(scenes))
        found: dict[int, tuple[Event, ...]] = {}
        for index in drawn:
            # Of slice i the frames are those at i and i + ½ s.
            if seen := seen_in(scenes[index], first, first + slices - 0.5):
                found[index] = seen
            if len(found) == clips:
                grid = Grid(slices, ROWS, COLUMNS)
                cut = slice(first * ROWS * COLUMNS, (first + slices) * ROWS * COLUMNS)
                return Part(embeds[torch.tensor(list(found))][:, cut].float(), grid, list(found.values()))


def contrast(scores: Tensor, holds: Tensor) -> Tensor:
    """InfoNCE, from texts to clips and from clips to texts. scores: [M, B]; holds: bool [M, B].

    A text has its true clips against all clips: one of them is enough. A clip has each of its true texts against those
    that are false.
    """
    told = holds.any(1) & ~holds.all(1)
    right = scores.masked_fill(~holds, -torch.inf)[told].logsumexp(1)
    of_texts = (scores[told].logsumexp(1) - right).mean()
    false = scores.masked_fill(holds, -torch.inf).logsumexp(0)
    of_clips = F.softplus(false - scores)[holds].mean()
    return of_texts + of_clips


def texts_about(seen: Sequence[Event], rng: Random) -> list[Description]:
    false = described(exchanged(seen, rng), rng), altered(seen, rng)
    return [caption(seen), *(described(seen, rng) for _ in range(3)), *false]


def kept_of(part: Part, rate: float, rng: Random) -> Tensor:
    """int64 [B, K]."""
    prunings = [ItemPruning(rate, RANDOM, rng.randrange(2**31)) if rate else ItemPruning(0.0, NONE) for _ in part.seen]
    kept = [keep_tokens(clip, part.grid, each) for clip, each in zip(part.embeds, prunings, strict=True)]
    return torch.stack(kept).long()


def step_loss(reader: Reader, part: Part, rng: Random) -> Tensor:
    told = list({each.text: each for seen in part.seen for each in texts_about(seen, rng)}.values())
    holds = torch.tensor([[each.holds(seen) for seen in part.seen] for each in told])
    rate = round(rng.uniform(0, HIGHEST_RATE), 3)
    of_texts, of_clips = (INSTRUCTIONS[max(0, rng.randrange(-2, len(INSTRUCTIONS)))] for _ in range(2))
    texts = reader.texts([each.text for each in told], of_texts)
    clips = reader.clips(part.embeds, kept_of(part, rate, rng), part.grid, of_clips)
    return contrast(reader.scale.exp().clamp(max=HIGHEST_SCALE) * texts @ clips.T, holds)


def train(output: Path, cache: Path, clips: int, start_from: Path, minutes: float, seed: int) -> None:
    torch.manual_seed(seed)
    rng, schedule = Random(seed), Schedule(minutes, tower_rate=0.0, text_rate=1e-3)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(start_from, dtype=torch.float32)
    model.model.visual.requires_grad_(False)
    use_uniform_windows(model)
    seeds = range(TRAINING_SEEDS, TRAINING_SEEDS + clips)
    lessons = Lessons([scene_of(each) for each in seeds], cached_clips(cache, seeds), PromptWriter(tokenizer), seed)
    unseen = range(VALIDATION_SEEDS, VALIDATION_SEEDS + VALIDATED_CLIPS)
    held_out = _held_out(model, unseen, cached_clips(cache, unseen))
    began = time.monotonic()
    video = encoded(model, lessons, VIEWS * clips)
    print(f"encoded {len(video.scenes)} clips, {time.monotonic() - began:.0f} s", flush=True)
    reader = Reader(model, tokenizer)
    trained = [*reader.text.parameters(), reader.scale]

    def loss_of(progress: float) -> Tensor:
        return step_loss(reader, part_of(video.scenes, video.embeds, rng, CLIPS_A_STEP), rng)

    for _ in steps("embedder", schedule, trained, optimisers(schedule, [], trained), loss_of):
        _validate(reader, held_out)
        save(output, model, tokenizer)


def save(output: Path, model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> None:
    """The checkpoint, with weights in float16 that are read as float32, and the modules that say what it is for."""
    save_checkpoint(output, model, tokenizer, DEMO)
    weights = output / "model.safetensors"
    save_file({name: each.half() for name, each in load_file(weights).items()}, weights, {"format": "pt"})
    weights.chmod(0o644)
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(
            (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
        )
    ]
    (output / "modules.json").write_text(json.dumps(modules, indent=2) + "\n")


@torch.no_grad()
def _held_out(model: Qwen2_5_VLForConditionalGeneration, seeds: Sequence[int], clips: Any) -> Part:
    """Whole clips that no step sees."""
    told = {index: seen for index, seed in enumerate(seeds) if (seen := seen_in(scene_of(seed), 0, SLICES))}
    embeds = torch.cat([embed(model, torch.from_numpy(clips[[index]].copy())) for index in told])
    return Part(embeds, VIDEO, list(told.values()))


@torch.no_grad()
def _validate(reader: Reader, part: Part) -> None:
    """Prints how many captions, and events, find a clip that they are true of first."""
    for rate in VALIDATED_RATES:
        clips = reader.clips(part.embeds, kept_of(part, rate, Random(0)), part.grid, INSTRUCTIONS[0])
        shares = []
        for make in (caption, first_event):
            told = [make(seen) for seen in part.seen]
            holds = torch.tensor([[each.holds(seen) for seen in part.seen] for each in told])
            best = (reader.texts([each.text for each in told], INSTRUCTIONS[0]) @ clips.T).argmax(1, keepdim=True)
            shares.append(holds.gather(1, best).float().mean().item())
        print(f"  rate {rate}: captions {shares[0]:.3f}, events {shares[1]:.3f} of {len(part.seen)}", flush=True)


def main() -> None:
    parser = training_flags(__doc__, DEMO_EMBEDDER, CLIPS)
    parser.add_argument("--from", dest="start_from", type=Path, default=DEMO_MODEL, help="a checkpoint to go on from")
    parser.add_argument("--minutes", type=float, default=45)
    args = parser.parse_args()
    train(args.output, args.cache, args.clips, args.start_from, args.minutes, args.seed)


if __name__ == "__main__":
    main()
