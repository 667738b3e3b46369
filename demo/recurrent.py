"""The demo's line in the layout of Qwen3.5: its sizes, its checkpoint, and its forward over branches.

Every other layer is a gated delta network, whose state runs through the prompt. The state after the prefix that the
branches of a clip share begins each of them, as if it were alone after the prefix:

    prefix ──▶ state ─┬─▶ question 1 answer 1
                      └─▶ question 2 answer 2 ...

Source: transformers' `Qwen3_5GatedDeltaNet`, whose rule computes it; sizes as those of `demo.checkpoint`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, torch_chunk_gated_delta_rule

from demo.checkpoint import DEMO, make_tokenizer, save_checkpoint
from demo.clips import FRAMES
from demo.model import LaidOut, Media, states_of
from demo.scenes import DURATION_S
from gridsieve.common.contract.plan import Grid
from gridsieve.families.parts.sampling import from_first_to_last
from gridsieve.services.preprocessing.prompt.positions import GridSpan
from gridsieve.services.preprocessing.video.timing import TimeBase

# Half of each head turns with the position.
ROPE = {
    "rope_type": "default",
    "rope_theta": DEMO.rope_theta,
    "partial_rotary_factor": 0.5,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
CHUNK_TOKENS = 32
# The range of time steps that a head of a recurrent layer begins with: it forgets in tens to thousands of tokens.
STEP_RANGE = (1e-3, 1e-1)
# Frames a second of most of the demo's clips.
CLIP_FPS = 4


@dataclass(frozen=True, slots=True)
class Branches:
    """Where the tokens of the branches are in a `LaidOut`. Q branches of at most L tokens.

    prefix: tokens before the branches. shown: bool [B, T], False at padding. columns: int64 [B, Q, L], of each branch's
    tokens; those after its end are of others. places: int64 [B, T - prefix], in [Q · L] of the tokens after the prefix.
    """

    prefix: int
    shown: Tensor
    columns: Tensor
    places: Tensor

    @classmethod
    def of(cls, laid: LaidOut) -> Branches:
        tail = laid.owner[:, laid.prefix :]
        branches = torch.arange(1, int(tail.max()) + 1)
        lengths = (tail[:, None] == branches[:, None]).sum(-1)
        starts = lengths.cumsum(1) - lengths
        longest = int(lengths.max())
        columns = (starts[..., None] + torch.arange(longest)).clamp(max=tail.shape[1] - 1)
        branch = tail.clamp(min=1) - 1
        places = branch * longest + torch.arange(tail.shape[1]) - starts.gather(1, branch)
        return cls(laid.prefix, laid.owner >= 0, laid.prefix + columns, places.clamp(0, len(branches) * longest - 1))


class BranchedDeltaNet(Qwen3_5GatedDeltaNet):
    """The class that such a layer takes on. branches: of the forward."""

    branches: Branches

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        """hidden_states: [B, T, D]. Returns the same shape."""
        branches, (clips, tokens) = self.branches, hidden_states.shape[:2]
        prefix, (count, longest) = branches.prefix, branches.columns.shape[1:]
        inputs = self.in_proj_qkv(hidden_states) * branches.shown[..., None]
        beta = self.in_proj_b(hidden_states).sigmoid()
        decay = -self.A_log.exp() * F.softplus(self.in_proj_a(hidden_states) + self.dt_bias)
        flat = branches.columns.flatten(1)

        def of_branches(rows: Tensor) -> Tensor:
            """[B, T, C] to [B · Q, L, C]."""
            taken = rows.gather(1, flat[..., None].expand(-1, -1, rows.shape[-1]))
            return taken.view(clips * count, longest, -1)

        before = self.conv_kernel_size - 1
        padded = F.pad(inputs[:, :prefix], (0, 0, before, 0))
        ends = padded[:, -before:].repeat_interleave(count, 0)
        first, state = self._rule(padded, beta[:, :prefix], decay[:, :prefix], None)
        rest, _state = self._rule(
            torch.cat([ends, of_branches(inputs)], 1),
            of_branches(beta),
            of_branches(decay),
            state.repeat_interleave(count, 0),
        )
        rest = rest.reshape(clips, count * longest, -1)
        rest = rest.gather(1, branches.places[..., None].expand(-1, -1, rest.shape[-1]))
        mixed = torch.cat([first.flatten(2), rest], 1).reshape(-1, self.head_v_dim)
        normed = self.norm(mixed, self.in_proj_z(hidden_states).reshape(-1, self.head_v_dim))
        out: Tensor = self.out_proj(normed.view(clips, tokens, -1))
        return out

    def _rule(self, inputs: Tensor, beta: Tensor, decay: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """inputs: those of the convolution, with as many before the tokens as it reads. Returns rows and the state."""
        tokens = beta.shape[1]
        weights = self.conv1d.weight[:, 0].T
        rows = F.silu(sum(weights[at] * inputs[:, at : at + tokens] for at in range(len(weights))))
        query, key, value = rows.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        found: tuple[Tensor, Tensor] = torch_chunk_gated_delta_rule(
            query.unflatten(-1, (-1, self.head_k_dim)),
            key.unflatten(-1, (-1, self.head_k_dim)),
            value.unflatten(-1, (-1, self.head_v_dim)),
            g=decay,
            beta=beta,
            chunk_size=CHUNK_TOKENS,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return found


def branched_states(text: Any, laid: LaidOut) -> Tensor:
    """`states_of` of a text model of `make_model`."""
    branches = Branches.of(laid)
    for layer in text.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.branches = branches
    return states_of(text, laid)


def slice_texts() -> list[str]:
    """What stands before each slice of a clip, without the marker."""
    frames = from_first_to_last(DURATION_S * CLIP_FPS, FRAMES)
    base = TimeBase.of_frames(Fraction(1), [frame / CLIP_FPS for frame in frames], 2)
    return [f"<{time_s:.1f} seconds>" for time_s in base.slices_s]


def media_of(grid: Grid, tokenizer: PreTrainedTokenizerFast) -> Media:
    """A clip or an image as Qwen3.5's prompts have it, between the markers of the chat template."""
    one = GridSpan(Grid(1, grid.h, grid.w), Fraction(0))
    if grid.t == 1:
        return one
    parts: list[GridSpan | tuple[int, ...]] = []
    for text in slice_texts():
        before = tokenizer(f"{text}<|vision_start|>")["input_ids"]
        parts += [tuple(before), one, tuple(tokenizer("<|vision_end|>")["input_ids"])]
    return parts


def make_model(seed: int) -> tuple[PreTrainedTokenizerFast, Qwen3_5ForConditionalGeneration]:
    """A model of random weights, for `branched_states`, and its tokenizer."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(DEMO, slice_texts() * 20)
    model = Qwen3_5ForConditionalGeneration(_config(tokenizer))
    for layer in model.model.language_model.layers:
        if hasattr(layer, "linear_attn"):
            _remembering(layer.linear_attn)
            layer.linear_attn.__class__ = BranchedDeltaNet
    return tokenizer, model


@torch.no_grad()
def _remembering(layer: Any) -> None:
    low, high = (math.log(each) for each in STEP_RANGE)
    steps = torch.empty_like(layer.dt_bias).uniform_(low, high).exp()
    layer.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # so that softplus gives the step
    layer.A_log.uniform_(0, math.log(4))


def save(
    folder: Path, model: Qwen3_5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, mtp: dict[str, Tensor]
) -> None:
    """All files of a checkpoint. mtp: the weights `mtp.*`, which transformers has no place for."""
    save_checkpoint(folder, model, tokenizer, DEMO)
    weights = folder / "model.safetensors"
    stored = {name: each.contiguous().clone() for name, each in mtp.items()}
    save_file(load_file(weights) | stored, weights, {"format": "pt"})
    weights.chmod(0o644)
    for name, own, frames in (
        ("preprocessor_config.json", {"processor_class": "Qwen3VLProcessor"}, 1),
        (
            "video_preprocessor_config.json",
            {"processor_class": "Qwen3VLProcessor", "video_processor_type": "Qwen3VLVideoProcessor"},
            FRAMES,
        ),
    ):
        settings = json.loads((folder / name).read_text())
        # The sizes of Qwen3-VL's videos are those of all frames together.
        settings["size"] = {edge: frames * pixels for edge, pixels in settings["size"].items()}
        (folder / name).write_text(json.dumps(settings | own, indent=2, sort_keys=True) + "\n")


def _config(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5Config:
    ids = tokenizer.get_vocab()
    head = DEMO.hidden // DEMO.heads
    return Qwen3_5Config(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": DEMO.hidden,
            "intermediate_size": DEMO.intermediate,
            "num_hidden_layers": DEMO.layers,
            "layer_types": ["linear_attention", "full_attention"] * (DEMO.layers // 2),
            "num_attention_heads": DEMO.heads,
            "num_key_value_heads": DEMO.kv_heads,
            "head_dim": head,
            "linear_num_key_heads": DEMO.heads,
            "linear_num_value_heads": DEMO.heads,
            "linear_key_head_dim": head,
            "linear_value_head_dim": head,
            "max_position_embeddings": DEMO.context_tokens,
            "rope_parameters": ROPE,
            "initializer_range": DEMO.init_range,
            "mtp_num_hidden_layers": 1,
            "tie_word_embeddings": True,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
        },
        vision_config={
            "depth": DEMO.tower_depth,
            "hidden_size": DEMO.tower_hidden,
            "intermediate_size": 3 * DEMO.tower_intermediate // 2,  # its layers have no gate
            "num_heads": DEMO.tower_heads,
            "patch_size": DEMO.patch_px,
            "spatial_merge_size": DEMO.merge,
            "temporal_patch_size": DEMO.temporal_patch,
            "num_position_embeddings": 64,
            "out_hidden_size": DEMO.hidden,
            "initializer_range": DEMO.init_range,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
