"""The demo model's forward pass over clips, in process: tower, pruning, language model.

A prompt has one video or image and any number of questions about it. Each question is a branch: it attends to the media
but to no other question, and has the positions that it would have alone:

    [<|im_start|>user video <|vision_end|>][question 1 answer 1][question 2 answer 2] ...
     prefix, pruned                         positions p …        positions p … again

Positions come from `services/preprocessing/prompt/positions.py`, kept tokens from `services/encoder/pruning`. It
knows nothing of scenes or training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from demo.checkpoint import IMAGE_MEAN, IMAGE_STD, SAMPLE_FPS, TOKENS_PER_SECOND
from demo.questions import Question
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.services.encoder.pruning.methods import keep_tokens
from gridsieve.services.preprocessing.prompt.positions import (
    GridSpan,
    LinearSpan,
    MediaSpan,
    Span,
    TextSpan,
    positions_of,
)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Media of any spans, such as those of pictures and sound that take turns. ids: of each token of the spans; that of
    a media token is -1."""

    spans: tuple[Span, ...]
    ids: tuple[int, ...]


# A media item: its grids, and the ids of the text between them, of families that put any there.
Media: TypeAlias = MediaSpan | Mixed | Sequence[MediaSpan | tuple[int, ...]]

PATCH_PX = 14
MERGE = 2
TEMPORAL_PATCH = 2
TIME_STEP = Fraction(TEMPORAL_PATCH * TOKENS_PER_SECOND, SAMPLE_FPS)
UNSUPERVISED = -100


@dataclass(frozen=True, slots=True)
class Branch:
    """The tokens of a question and its answer, with the ends of their turns; the answer starts at `answer_at`."""

    ids: tuple[int, ...]
    answer_at: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One media item with its questions. `before` ends with <|vision_start|>; `branches` begin after <|vision_end|>."""

    before: tuple[int, ...]
    branches: tuple[Branch, ...]


def uniform_windows(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention within windows of equal length, in one call: [1, heads, S, head] → [1, S, heads, head].

    Unless the attention's name contains "flash", transformers calls it once per window and does not pass the bounds.
    """
    windows = kwargs["cu_seq_lens_q"].numel() - 1
    _, heads, tokens, head = query.shape
    split = (heads, windows, tokens // windows, head)
    query, key, value = (part[0].reshape(split).transpose(0, 1) for part in (query, key, value))
    found = F.scaled_dot_product_attention(query, key, value, scale=kwargs["scaling"])
    return found.transpose(1, 2).reshape(1, tokens, heads, head), None


def use_uniform_windows(model: Qwen2_5_VLForConditionalGeneration) -> None:
    """Make the tower compute all windows in one call; only for clips whose frames consist of whole windows."""
    AttentionInterface.register("uniform_flash_windows", uniform_windows)
    model.model.visual.config._attn_implementation_internal = "uniform_flash_windows"


def patches_of(clips: Tensor) -> Tensor:
    """Normalised patches of uint8 [B, frames, 3, H, W] in the order of transformers' processor: [B·t·h·w·4, 1176]."""
    mean = torch.tensor(IMAGE_MEAN).view(3, 1, 1)
    std = torch.tensor(IMAGE_STD).view(3, 1, 1)
    pixels = (clips.float() / 255 - mean) / std
    batch, frames, channels, height, width = clips.shape
    block = PATCH_PX * MERGE
    split = pixels.view(
        batch * frames // TEMPORAL_PATCH,
        TEMPORAL_PATCH,
        channels,
        height // block,
        MERGE,
        PATCH_PX,
        width // block,
        MERGE,
        PATCH_PX,
    )
    return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, channels * TEMPORAL_PATCH * PATCH_PX**2)


def embed(model: Qwen2_5_VLForConditionalGeneration, clips: Tensor) -> Tensor:
    """The tower's merged tokens for uint8 clips [B, frames, 3, H, W]: [B, t·h·w, D]."""
    batch, frames, _, height, width = clips.shape
    slices = frames // TEMPORAL_PATCH
    grid = torch.tensor([[batch * slices, height // PATCH_PX, width // PATCH_PX]])
    merged: Tensor = model.model.visual(patches_of(clips), grid_thw=grid).pooler_output
    return merged.view(batch, -1, merged.shape[-1])


def prune(embeds: Tensor, grid: Grid, pruning: ItemPruning) -> Tensor:
    """The indices of the kept tokens of each clip: int64 [B, K]."""
    return torch.stack([keep_tokens(clip.detach(), grid, pruning) for clip in embeds]).long()


@dataclass(frozen=True, slots=True)
class LaidOut:
    """Prompts of several clips as one input of the language model, padded to T tokens.

    inputs: [B, T, D]. positions: int64 [3, B, T], or [B, T] if they have one axis. owner: int64 [B, T], the branch of
    each token from 1 on; 0 is the shared prefix, -1 padding. prefix: the tokens before the branches, padding included.
    labels: int64 [B, T], the correct token after each token; UNSUPERVISED where that is not part of an answer.
    """

    inputs: Tensor
    positions: Tensor
    owner: Tensor
    labels: Tensor
    prefix: int


def lay_out(
    embed_tokens: torch.nn.Module,
    embeds: Tensor,
    kept: Tensor,
    media: Media,
    prompts: Sequence[Prompt],
    vision_end: int,
) -> LaidOut:
    """One prompt per clip. embeds: [B, t·h·w, D], of the grids in `media`, whose text is kept; kept: int64 [B, K]."""
    mixed = media if isinstance(media, Mixed) else _mixed(media)
    between = torch.tensor(mixed.ids)
    is_media = between < 0
    shown = (~is_media).expand(len(prompts), -1).clone()
    shown.scatter_(1, is_media.nonzero()[:, 0][kept], True)
    places = shown.nonzero()[:, 1].view(len(prompts), -1)
    longest_before = max(len(prompt.before) for prompt in prompts)
    tails = [[token for branch in prompt.branches for token in branch.ids] for prompt in prompts]
    longest_tail = max(len(tail) for tail in tails)
    count = places.shape[1]
    prefix = longest_before + count + 1
    total = prefix + longest_tail
    ids = torch.full((len(prompts), total), vision_end)
    positions = torch.zeros(3, len(prompts), total, dtype=torch.long)
    owner = torch.full((len(prompts), total), -1)
    labels = torch.full((len(prompts), total), UNSUPERVISED)
    for row, prompt in enumerate(prompts):
        before = len(prompt.before)
        longest = max(len(branch.ids) for branch in prompt.branches)
        full = torch.from_numpy(positions_of([TextSpan(before), *mixed.spans, TextSpan(1 + longest)])).long()
        start = longest_before - before
        ids[row, start:longest_before] = torch.tensor(prompt.before)
        owner[row, start:prefix] = 0
        positions[:, row, start:longest_before] = full[:, :before]
        positions[:, row, longest_before : prefix - 1] = full[:, before + places[row]]
        after = full[:, before + len(between) :]
        positions[:, row, prefix - 1] = after[:, 0]
        at = prefix
        for number, branch in enumerate(prompt.branches, 1):
            end = at + len(branch.ids)
            ids[row, at:end] = torch.tensor(branch.ids)
            owner[row, at:end] = number
            positions[:, row, at:end] = after[:, 1 : 1 + len(branch.ids)]
            labels[row, at + branch.answer_at - 1 : end - 1] = torch.tensor(branch.ids[branch.answer_at :])
            at = end
    ids[:, longest_before : prefix - 1] = between[places].clamp(min=0)
    numbers = (is_media.cumsum(0) - 1)[places]
    gathered = torch.gather(embeds, 1, numbers.clamp(min=0)[..., None].expand(-1, -1, embeds.shape[-1]))
    text = embed_tokens(ids)
    item = torch.where(is_media[places][..., None], gathered, text[:, longest_before : prefix - 1])
    inputs = torch.cat((text[:, :longest_before], item, text[:, prefix - 1 :]), dim=1)
    return LaidOut(inputs, positions[0] if isinstance(media, LinearSpan) else positions, owner, labels, prefix)


def _mixed(media: MediaSpan | Sequence[MediaSpan | tuple[int, ...]]) -> Mixed:
    parts = [media] if isinstance(media, GridSpan | LinearSpan) else list(media)
    spans = tuple(TextSpan(len(part)) if isinstance(part, tuple) else part for part in parts)
    return Mixed(
        spans, tuple(id_ for part in parts for id_ in (part if isinstance(part, tuple) else [-1] * part.tokens))
    )


def answer_logits(
    model: Any,
    embeds: Tensor,
    kept: Tensor,
    media: Media,
    prompts: Sequence[Prompt],
    vision_end: int,
    read: Callable[[Any, LaidOut], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The logits at which each branch predicts its answer, and the correct tokens.

    model: with `model.language_model` and `lm_head`. The others as in `lay_out`, whose positions have one axis if
    `media` is linear. read: in place of `states_of`.
    Returns logits [B, L, V] and labels int64 [B, L], UNSUPERVISED at positions outside answers.
    """
    laid = lay_out(model.model.language_model.embed_tokens, embeds, kept, media, prompts, vision_end)
    states = (read or states_of)(model.model.language_model, laid)
    return model.lm_head(states[:, laid.prefix - 1 :]), laid.labels[:, laid.prefix - 1 :]


def states_of(text: Any, laid: LaidOut) -> Tensor:
    """The text model's output for each token, after its norm: [B, T, D]."""
    states: Tensor = text(
        inputs_embeds=laid.inputs,
        position_ids=laid.positions,
        attention_mask={"full_attention": seen_by(laid.owner)[:, None], "linear_attention": None},
        use_cache=False,
    ).last_hidden_state
    return states


def seen_by(owner: Tensor) -> Tensor:
    """What each token attends to, bool [B, T, T]: causal within the prefix and within each branch, and from every
    branch to the prefix. owner: as in `LaidOut`."""
    tokens = owner.shape[1]
    query, key = owner[:, :, None], owner[:, None, :]
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    seen = causal & ((key == 0) | (key == query)) & (key >= 0)
    # A padded row must attend to something, or its softmax is NaN.
    return seen | torch.eye(tokens, dtype=torch.bool)


class PromptWriter:
    """Tokenizes questions as branches, exactly as the chat template would. begin, end: the tokens around the media."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, begin: str = "<|vision_start|>", end: str = "<|vision_end|>"
    ) -> None:
        self.tokenizer = tokenizer
        self._begin, self.vision_end = begin, tokenizer.get_vocab()[end]
        self._cached: dict[tuple[str, str], Branch] = {}

    def before(self, system: str | None = None) -> tuple[int, ...]:
        text = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
        return tuple(self.tokenizer(f"{text}<|im_start|>user\n{self._begin}")["input_ids"])

    def branch(self, question: str, answer: str) -> Branch:
        if (question, answer) not in self._cached:
            asked = self.tokenizer(f"{question}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
            told = self.tokenizer(f"{answer}<|im_end|>")["input_ids"]
            self._cached[question, answer] = Branch((*asked, *told), len(asked))
        return self._cached[question, answer]

    def asked(self, questions: Sequence[Question], system: str | None = None) -> Prompt:
        """A prompt with these questions."""
        return Prompt(self.before(system), tuple(self.branch(each.text, each.answer) for each in questions))
