"""Which language models there are. Adding one adds a file and a line here."""

from __future__ import annotations

import torch
from transformers import AutoConfig

from common.checkpoint import Checkpoint
from services.generation.families import qwen2_5_vl, qwen3_vl
from services.generation.model.language_model import LanguageModel
from services.generation.parallel.group import Group
from services.generation.parallel.sharding import check_sizes

FAMILIES = {
    "qwen2_5_vl": qwen2_5_vl.load,
    "qwen3_vl": qwen3_vl.load,
    "qwen3_vl_moe": qwen3_vl.load_moe,
}


def check_ranks(checkpoint: Checkpoint, ranks: int) -> None:
    """Raises StartupError if a checkpoint's language model cannot be shared out among so many ranks."""
    checkpoint.pick(FAMILIES)
    check_sizes(AutoConfig.from_pretrained(checkpoint.folder).get_text_config(), ranks)


def load_language_model(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, group: Group | None = None
) -> LanguageModel:
    """A checkpoint's language model, or a rank's part of it.

    Raises StartupError for a model type that is not supported, missing or unknown weights, and what this engine's
    attention lacks; of a group, also for heads that cannot be shared out among it.
    """
    return checkpoint.pick(FAMILIES)(checkpoint, dtype, device, group)
