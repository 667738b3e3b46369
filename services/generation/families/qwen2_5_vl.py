"""Qwen2.5-VL's language model: transformers' own text class, its weights by prefix.

Source: Qwen2.5-VL, arXiv 2502.13923; the key names of Qwen/Qwen2.5-VL-7B-Instruct, and those transformers 5 uses.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding, Qwen2_5_VLTextModel

from common.checkpoint import Checkpoint
from common.errors import StartupError
from services.generation.attention import ATTENTION
from services.generation.families.language_model import LanguageModel, fill, has_weights, read_weights

# transformers 5 writes the first when told not to keep the checkpoints' own, which is the second.
TEXT_PREFIXES = ("model.language_model.", "model.")
LM_HEAD_PREFIX = "lm_head."


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    """Raises StartupError for missing or unknown weights, and for what this engine's attention lacks."""
    config = Qwen2_5_VLConfig.from_pretrained(checkpoint.folder)
    text_config = config.text_config
    assert isinstance(text_config, Qwen2_5_VLTextConfig)
    if text_config.use_sliding_window:
        raise StartupError("text_config.use_sliding_window: sliding window attention is not supported")
    rope_type = dict(text_config.rope_parameters or {}).get("rope_type")
    if rope_type != "default":
        raise StartupError(f"text_config.rope_parameters.rope_type {rope_type!r} is not supported, only 'default'")
    text_config._attn_implementation = ATTENTION
    with torch.device("meta"):
        text = Qwen2_5_VLTextModel(text_config)
        lm_head = nn.Linear(text_config.hidden_size, text_config.vocab_size, bias=False)
    # Its frequencies are no weights: they are computed, which on the meta device they were not.
    text.rotary_emb = Qwen2_5_VLRotaryEmbedding(text_config).to(device)  # type: ignore[arg-type]
    prefix = next((each for each in TEXT_PREFIXES if has_weights(checkpoint, each)), TEXT_PREFIXES[-1])
    fill(text, read_weights(checkpoint, prefix, dtype, device), prefix)
    if config.tie_word_embeddings:
        lm_head.weight = text.embed_tokens.weight
    else:
        fill(lm_head, read_weights(checkpoint, LM_HEAD_PREFIX, dtype, device), LM_HEAD_PREFIX)
    return LanguageModel(
        text=text.train(False).requires_grad_(False),
        embed_tokens=text.embed_tokens,
        lm_head=lm_head.requires_grad_(False),
        layers=text_config.num_hidden_layers,
        kv_heads=text_config.num_key_value_heads or text_config.num_attention_heads,
        head_dim=text_config.hidden_size // text_config.num_attention_heads,
        context_tokens=text_config.max_position_embeddings,
        embed_levels=0,
    )
