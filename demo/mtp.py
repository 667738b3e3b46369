"""Trains a small model in the layout of Qwen3.5 with multi-token prediction: `python -m demo.mtp`.

No published checkpoint of Qwen3.5 is as small as the demo's. Its tower learns to give the tokens of the demo model's
tower for the same slices, its language model to answer as in `demo.train`, with the tower fixed. Then the layer that
drafts learns from this model as the head of `demo.draft` does from the demo model, several tokens ahead, with the
model's embedding and output layer. Each stage follows the wall clock. The weights `mtp.*` are in the checkpoint.
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from benchmarks.drafts import MTP_MODEL
from demo.clips import TRAINING_SEEDS, VALIDATION_SEEDS, cached_clips, scene_of
from demo.distillation import begin, loss_of
from demo.draft import Encoded, Trainer, batches, encoded, optimisers, unseen_clips, validate
from demo.flags import training_flags
from demo.lessons import Lessons
from demo.model import UNSUPERVISED, Prompt, PromptWriter, answer_logits, use_uniform_windows
from demo.recurrent import branched_states, make_model, media_of, save
from demo.stage import steps
from demo.train import Schedule, slices_of
from demo.train import optimisers as of_both
from gridsieve.common.checkpoint import DEMO_MODEL
from gridsieve.services.generation.model.attention import ATTENTION
from gridsieve.services.generation.model.draft_head import DraftSizes
from gridsieve.services.generation.model.mtp import MtpHead

CLIPS, VIEWS, VALIDATED_CLIPS = 600, 2, 24
# Of all the time; the rest is the layer's that drafts.
TOWER_SHARE, TEXT_SHARE = 0.34, 0.42


def make_head(model: Any) -> MtpHead:
    """The layer that drafts for a model, with random weights, and what it takes of the model."""
    text, config = model.model.language_model, model.config.text_config
    last = config.num_hidden_layers + 1
    sizes = DraftSizes(
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, (last,), True, ahead=False, axes=3
    )
    head = MtpHead(sizes, text)
    for name, parameter in head.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.5 / parameter.shape[1] ** 0.5)
        elif "norm" not in name:
            raise AssertionError(name)
    attention: Any = head.layers[0].self_attn
    attention.config = copy.deepcopy(config)
    attention.config._attn_implementation = ATTENTION
    head.rotary_emb = text.rotary_emb
    return head


def weights_of(head: MtpHead) -> dict[str, Tensor]:
    return {f"mtp.{name}": each.detach() for name, each in head.named_parameters()}


def train(output: Path, cache: Path, clips: int, minutes: float, seed: int) -> None:
    rng = Random(seed)
    schedule = Schedule(minutes)
    teacher = Qwen2_5_VLForConditionalGeneration.from_pretrained(DEMO_MODEL, dtype=torch.float32).train(False)
    use_uniform_windows(teacher)
    tokenizer, model = make_model(seed)
    use_uniform_windows(model)
    begin_with_embedding(model, tokenizer, teacher, AutoTokenizer.from_pretrained(DEMO_MODEL))
    writer = PromptWriter(tokenizer)
    seeds = range(TRAINING_SEEDS, TRAINING_SEEDS + clips)
    unseen = range(VALIDATION_SEEDS, VALIDATION_SEEDS + VALIDATED_CLIPS)
    lessons = Lessons([scene_of(each) for each in seeds], cached_clips(cache, seeds), writer, seed)
    unseen_frames = cached_clips(cache, unseen)

    tower, text = list(model.model.visual.parameters()), list(model.model.language_model.parameters())

    begin(model.model.visual, teacher.model.visual)
    shorter = replace(schedule, minutes=TOWER_SHARE * minutes)
    of_tower = steps(
        "tower",
        shorter,
        tower,
        of_both(shorter, tower, []),
        lambda _: loss_of(model, teacher, slices_of(lessons, rng)[-1][::2]),
    )
    for _ in of_tower:
        pass
    model.model.visual.requires_grad_(False)
    began = time.monotonic()
    video, pictures = encoded(model, lessons, VIEWS * clips), encoded(model, lessons, clips, rng)
    held_out = unseen_clips(model, writer, unseen, unseen_frames, seed)
    print(f"encoded {len(video.scenes)} clips and {len(pictures.scenes)} images, {time.monotonic() - began:.0f} s")
    source = batches(video, pictures, lessons, rng)

    def text_loss(progress: float) -> Tensor:
        embeds, kept, grid, prompts = next(source)
        logits, labels = answer_logits(
            model, embeds, kept, media_of(grid, tokenizer), prompts, writer.vision_end, branched_states
        )
        asked = labels != UNSUPERVISED
        return F.cross_entropy(logits[asked], labels[asked])

    shorter = replace(schedule, minutes=TEXT_SHARE * minutes)
    for _ in steps("text", shorter, text, of_both(shorter, [], text), text_loss):
        judge(model, writer, held_out)
    model.train(False).requires_grad_(False)
    head = make_head(model)
    trainer = Trainer(
        model,
        writer,
        head,
        range(len(tokenizer)),
        model.lm_head,
        lambda grid: media_of(grid, tokenizer),
        branched_states,
    )
    shorter = replace(schedule, minutes=(1 - TOWER_SHARE - TEXT_SHARE) * minutes)
    drafting = list(head.parameters())
    for _ in steps("mtp", shorter, drafting, optimisers(head), lambda _: trainer.loss(*next(source))[0]):
        validate(trainer, held_out, rng)
        save(output, model, tokenizer, weights_of(head))


@torch.no_grad()
def begin_with_embedding(model: Any, tokenizer: Any, teacher: Any, known: Any) -> None:
    """Gives tokens that both models have the demo model's embedding, in whose space its tower's tokens are."""
    table, theirs = model.get_input_embeddings().weight, teacher.get_input_embeddings().weight
    table.normal_(std=float(theirs.std()))
    vocabulary = known.get_vocab()
    for token, index in tokenizer.get_vocab().items():
        if token in vocabulary:
            table[index] = theirs[vocabulary[token]]


@torch.no_grad()
def judge(model: Any, writer: PromptWriter, held_out: list[tuple[Encoded, list[Prompt]]]) -> None:
    """Prints the share of tokens, and of answers, that are correct about unpruned clips that no step sees."""
    tokens, answers = list[Tensor](), list[bool]()
    for source, prompts in held_out:
        kept = torch.arange(source.grid.tokens).expand(len(source.scenes), -1)
        media = media_of(source.grid, writer.tokenizer)
        logits, labels = answer_logits(
            model, source.embeds.float(), kept, media, prompts, writer.vision_end, branched_states
        )
        right = (logits.argmax(-1) == labels) | (labels == UNSUPERVISED)
        tokens.append(right[labels != UNSUPERVISED])
        for row, prompt in zip(right, prompts, strict=True):
            at = 1
            for branch in prompt.branches:
                answers.append(bool(row[at : at + len(branch.ids)].all()))
                at += len(branch.ids)
    share = sum(answers) / len(answers)
    print(f"  correct tokens {torch.cat(tokens).float().mean():.3f}, answers {share:.3f}", flush=True)


def main() -> None:
    parser = training_flags(__doc__, MTP_MODEL, CLIPS)
    parser.add_argument("--minutes", type=float, default=45)
    args = parser.parse_args()
    train(args.output, args.cache, args.clips, args.minutes, args.seed)


if __name__ == "__main__":
    main()
