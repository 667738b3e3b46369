"""EAGLE-3 heads and multi-token prediction with random weights, as published checkpoints store them, and their forwards
without a cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer

from tests.families import text_and_head

SPECFORGE, ANGELSLIM = "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"
MTP = "mtp"
LAYERS: Mapping[str, Any] = {"qwen3_5_text": Qwen3_5DecoderLayer, "qwen3_5_moe_text": Qwen3_5MoeDecoderLayer}
DRAFT_VOCAB = 40
# M-RoPE of the heads of Qwen2.5-VL and of Qwen3-VL, for 8 frequencies.
ROPES: Mapping[str, Mapping[str, Any]] = {
    SPECFORGE: {"type": "mrope", "mrope_section": [2, 3, 3]},
    ANGELSLIM: {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
}


def write_head(folder: Path, architecture: str, hidden: int, vocab: int, seed: int = 0, **config: Any) -> Path:
    """A head of one layer, whose heads are not the model's. config: further fields, or others."""
    sizes: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "rope_scaling": ROPES[architecture],
        "vocab_size": vocab,
        "draft_vocab_size": DRAFT_VOCAB,
        "tie_word_embeddings": False,
        **config,
    }
    draw = torch.Generator().manual_seed(seed)
    head_dim = sizes["head_dim"]
    wide, narrow = sizes["num_attention_heads"] * head_dim, sizes["num_key_value_heads"] * head_dim
    layer = "layers.0" if architecture == ANGELSLIM else "midlayer"
    shapes = {
        "fc": (hidden, 3 * hidden),
        f"{layer}.self_attn.q_proj": (wide, 2 * hidden),
        f"{layer}.self_attn.k_proj": (narrow, 2 * hidden),
        f"{layer}.self_attn.v_proj": (narrow, 2 * hidden),
        f"{layer}.self_attn.o_proj": (hidden, wide),
        f"{layer}.mlp.gate_proj": (sizes["intermediate_size"], hidden),
        f"{layer}.mlp.up_proj": (sizes["intermediate_size"], hidden),
        f"{layer}.mlp.down_proj": (hidden, sizes["intermediate_size"]),
        "lm_head": (sizes["draft_vocab_size"], hidden),
    }
    weights = {f"{name}.weight": 0.2 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    norms = ("norm", *(f"{layer}.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")))
    weights |= {f"{name}.weight": 1 + 0.2 * torch.randn(hidden, generator=draw) for name in norms}
    chosen = torch.randperm(vocab, generator=draw)[: sizes["draft_vocab_size"]].sort().values
    weights["d2t"] = chosen - torch.arange(len(chosen))
    weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes))
    save_file(weights, folder / "model.safetensors")
    return folder


def write_mtp(folder: Path, seed: int = 0) -> Path:
    """Adds multi-token prediction to a checkpoint of Qwen3.5, as published: experts are stacked."""
    config, draw = AutoConfig.from_pretrained(folder).text_config, torch.Generator().manual_seed(seed)
    hidden = config.hidden_size
    shapes: dict[str, Sequence[int]] = {"fc.weight": (hidden, 2 * hidden)}
    shapes |= {f"{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    with torch.device("meta"):
        layer = LAYERS[config.model_type](config, config.layer_types.index("full_attention"))
    shapes |= {f"layers.0.{name}": each.shape for name, each in layer.state_dict().items()}
    weights = {f"mtp.{name}": 0.15 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    save_file(weights, folder / "mtp.safetensors")
    return folder


def mtp_tokens(
    folder: Path, reference: Any, embeds: Tensor, states: Tensor, positions: Tensor, count: int
) -> tuple[list[int], float]:
    """As `head_tokens`, of the multi-token prediction of a checkpoint, by transformers' own layer.

    reference: its model in transformers. states: [n, D], what the output layer reads.
    """
    text, lm_head = text_and_head(reference)
    stored = {name.removeprefix("mtp."): each for name, each in load_file(folder / "mtp.safetensors").items()}
    layer = LAYERS[text.config.model_type](text.config, text.config.layer_types.index("full_attention")).eval()
    layer.load_state_dict(
        {name.removeprefix("layers.0."): each for name, each in stored.items() if name.startswith("layers.0.")}
    )

    def norm(rows: Tensor, name: str) -> Tensor:
        return _norm(rows, 1 + stored[f"{name}.weight"], 1e-6)

    def forward(embeds: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        both = torch.cat([norm(embeds, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")], dim=-1)
        rows = (both @ stored["fc.weight"].T)[None]
        later = torch.full((len(embeds), len(embeds)), float("-inf")).triu(1)
        rotations = text.rotary_emb(rows, positions[:, None])
        return norm(layer(rows, position_embeddings=rotations, attention_mask=later[None, None])[0], "norm")

    return _drafted(forward, lm_head, embeds, states, positions, text.get_input_embeddings().weight, count)


def head_tokens(
    weights: Mapping[str, Tensor],
    rotary: Any,
    embeds: Tensor,
    states: Sequence[Tensor],
    positions: Tensor,
    embedding: Tensor,
    count: int,
) -> tuple[list[int], float]:
    """The tokens that a head drafts after n + 1 known tokens, recomputing the whole sequence for each; and the smallest
    margin between the best of them and the second.

    rotary: transformers' rotary embedding for its config. embeds: [n, D], of tokens 1 … n. states: of tokens 0 … n − 1,
    [n, D] each. positions: [3, n]. embedding: [V, D], of drafted tokens.
    """
    named = {name.replace("layers.0.", "midlayer."): each for name, each in weights.items()}
    hidden = torch.cat(list(states), dim=-1) @ named["fc.weight"].T
    targets = torch.arange(len(named["d2t"])) + named["d2t"]

    def forward(embeds: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        return _layer(named, rotary, embeds, hidden, positions)

    def scores(output: Tensor) -> Tensor:
        own = _norm(output, named["norm.weight"]) @ named["lm_head.weight"].T
        return torch.full((len(embedding),), float("-inf")).index_copy(0, targets, own)

    return _drafted(forward, scores, embeds, hidden, positions, embedding, count)


def _drafted(
    forward: Callable[[Tensor, Tensor, Tensor], Tensor],
    score: Callable[[Tensor], Tensor],
    embeds: Tensor,
    hidden: Tensor,
    positions: Tensor,
    embedding: Tensor,
    count: int,
) -> tuple[list[int], float]:
    drafted: list[int] = []
    margin = float("inf")
    while True:
        output = forward(embeds, hidden, positions)[-1]
        scores = score(output)
        first, second = scores.topk(2).values.tolist()
        margin = min(margin, first - second)
        drafted.append(int(scores.argmax()))
        if len(drafted) == count:
            return drafted, margin
        embeds = torch.cat([embeds, embedding[drafted[-1]][None]])
        hidden = torch.cat([hidden, output[None]])
        positions = torch.cat([positions, positions[:, -1:].amax(0, keepdim=True).expand(3, 1) + 1], dim=1)


def _layer(named: Mapping[str, Tensor], rotary: Any, embeds: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
    def weight(name: str) -> Tensor:
        return named[f"midlayer.{name}.weight"]

    both = torch.cat([_norm(embeds, weight("input_layernorm")), _norm(hidden, weight("hidden_norm"))], dim=-1)
    query, key, value = (
        (both @ weight(f"self_attn.{name}_proj").T).unflatten(-1, (-1, 16)).transpose(0, 1) for name in "qkv"
    )
    cos, sin = rotary(embeds[None], positions[:, None])
    query, key = (each * cos[0] + _half_turned(each) * sin[0] for each in (query, key))
    attended = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, enable_gqa=True)[0]
    hidden = hidden + attended.transpose(0, 1).flatten(1) @ weight("self_attn.o_proj").T
    rows = _norm(hidden, weight("post_attention_layernorm"))
    gated = F.silu(rows @ weight("mlp.gate_proj").T) * (rows @ weight("mlp.up_proj").T)
    return hidden + gated @ weight("mlp.down_proj").T


def _norm(rows: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return rows * (rows.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def _half_turned(heads: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
