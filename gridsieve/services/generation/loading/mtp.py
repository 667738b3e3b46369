"""Loads the multi-token prediction of a checkpoint, its weights `mtp.*`, which transformers leaves out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import Qwen3_5MoeTextModel, Qwen3_5TextModel

from gridsieve.common.checkpoint import DRAFTS, Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.families import family_of
from gridsieve.services.compute.packed_linear import packed
from gridsieve.services.generation.loading.int4 import stored_format
from gridsieve.services.generation.loading.text_model import make_ready, read_output_layer
from gridsieve.services.generation.loading.weights import fill, has_weights, read_weights
from gridsieve.services.generation.model.draft_head import DraftSizes
from gridsieve.services.generation.model.fused_layers import RotaryTable
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.layers import number_layers
from gridsieve.services.generation.model.mtp import MtpHead

# In place of a checkpoint's name.
MTP = "mtp"
_PREFIX = "mtp."


def load_mtp(checkpoint: Checkpoint, model: LanguageModel) -> MtpHead:
    """The multi-token prediction of the checkpoint that `model` is of, in its dtype and on its device.

    From now on it reads every forward of the text model. For a rank's part of a model it is whole, as is its output
    layer, so that this rank drafts alone.

    Raises StartupError for a model without one, and weights that are missing or unknown: those of several layers, of
    an own embedding, or quantised.
    """
    text: Any = model.text
    if not isinstance(text, Qwen3_5TextModel | Qwen3_5MoeTextModel):
        raise StartupError(f"--draft-model {MTP}: only models with the layers of Qwen3.5 have one that is supported")
    # Such as a file beside the index.
    files = checkpoint if has_weights(checkpoint, _PREFIX) else replace(checkpoint, option=DRAFTS)
    if not has_weights(files, _PREFIX):
        raise StartupError(f"--draft-model {MTP}: the checkpoint has no weights {_PREFIX}*")
    last, heads, kv_heads = len(text.layers) + 1, text.config.num_attention_heads, text.config.num_key_value_heads
    sizes = DraftSizes(heads, kv_heads, model.head_dim, (last,), before_levels=True, ahead=False, axes=3)
    with torch.device("meta"):
        head = MtpHead(sizes, text)
    try:
        fill(head, read_weights(files, _PREFIX, model.dtype, model.device, {}), _PREFIX)
    except StartupError as error:
        raise StartupError(f"--draft-model {MTP}: {error}") from error
    rotary = text.rotary_emb
    head.rotary_emb = rotary.rotary if isinstance(rotary, RotaryTable) else rotary
    number_layers(head)
    make_ready(head)
    head.lm_head = model.lm_head if model.heads == heads else _whole_output_layer(checkpoint, text)
    head.read(text)
    return head


def _whole_output_layer(checkpoint: Checkpoint, text: Any) -> nn.Module:
    config = family_of(checkpoint).load("text").config(checkpoint)
    whole = read_output_layer(checkpoint, config, text.embed_tokens.weight, stored_format(checkpoint))
    return packed(whole.requires_grad_(False))
