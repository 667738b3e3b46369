"""EAGLE-3 heads with random weights, as published checkpoints store them, and their forward without a cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

SPECFORGE, ANGELSLIM = "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"
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
    drafted: list[int] = []
    margin = float("inf")
    while True:
        output = _layer(named, rotary, embeds, hidden, positions)[-1]
        scores = _norm(output, named["norm.weight"]) @ named["lm_head.weight"].T
        best = int(scores.argmax())
        first, second = scores.topk(2).values.tolist()
        margin = min(margin, first - second)
        drafted.append(best + int(named["d2t"][best]))
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


def _norm(rows: Tensor, weight: Tensor) -> Tensor:
    return rows * (rows.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def _half_turned(heads: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
