"""Cosmos 3 Edge's language model: Llama's with M-RoPE and a squared ReLU.

The files hold a model that makes videos beside it, whose weights are not read.
Source: `Cosmos3EdgeForConditionalGeneration` of transformers 5.24; weight names of nvidia/Cosmos3-Edge.
"""

from __future__ import annotations

import re

from transformers import Cosmos3EdgeConfig, Cosmos3EdgeForConditionalGeneration
from transformers.models.cosmos3_edge.modeling_cosmos3_edge import Cosmos3EdgeTextModel, Cosmos3EdgeTextRotaryEmbedding

from gridsieve.families.cosmos.names import own_name
from gridsieve.services.generation.loading.text_family import TextClasses, TextFamily

# Of transformers, and of published checkpoints.
_TEXT_PREFIXES = ("model.language_model.", "")
_OF_TEXT = ("embed_tokens.", "layers.", "norm.")
_OF_GENERATOR = re.compile(
    r"layers\.\d+\.(.+_moe_gen|self_attn\.(add_[qkv]_proj|to_add_out|norm_added_[qk]|k_norm_und_for_gen))\."
)
_CLASSES = TextClasses(Cosmos3EdgeForConditionalGeneration, Cosmos3EdgeTextModel, Cosmos3EdgeTextRotaryEmbedding)


def _named(name: str) -> str | None:
    return own_name(name) if name.startswith(_OF_TEXT) and not _OF_GENERATOR.match(name) else None


FAMILY = TextFamily.of(Cosmos3EdgeConfig, _CLASSES, _TEXT_PREFIXES, named=lambda _: _named)
