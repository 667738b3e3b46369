"""Language models of Nemotron VL: Mamba2, a few attention layers, and experts or MLPs, each a block of its own. Nothing
in them knows positions.

Source: `NemotronH_Omni_Reasoning_V3` of transformers 5.24; weight names of
nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16 and of NVIDIA-Nemotron-Nano-12B-v2-VL-BF16, as vLLM 0.32 reads them.
The weights `mtp.*`, which predict several tokens, are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from transformers import NemotronH_Omni_Reasoning_V3, NemotronH_Omni_Reasoning_V3_Config
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHModel

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.generation.loading.text_family import TextClasses, TextFamily
from gridsieve.services.generation.parallel.sharding import WHOLE_OUTPUT

# Of transformers 5, and of published checkpoints.
TEXT_PREFIXES = ("language_model.model.", "language_model.backbone.")
# transformers' own plan shards experts alone. Every rank keeps the whole state of recurrent layers.
_PLAN = {
    "layers.*.mixer.q_proj": "colwise",
    "layers.*.mixer.k_proj": "colwise",
    "layers.*.mixer.v_proj": "colwise",
    "layers.*.mixer.o_proj": "rowwise",
    "layers.*.mixer.in_proj": WHOLE_OUTPUT,
    "layers.*.mixer.out_proj": WHOLE_OUTPUT,
    "layers.*.mixer.up_proj": "colwise",
    "layers.*.mixer.down_proj": "rowwise",
    "layers.*.mixer.shared_experts.up_proj": "colwise",
    "layers.*.mixer.shared_experts.down_proj": "rowwise",
    "layers.*.mixer.experts.up_proj": "colwise",
    "layers.*.mixer.experts.down_proj": "rowwise",
    "layers.*.mixer.experts": "moe_tp_experts",
}


class _Text(NemotronHModel):
    """transformers' text model, whose table of embeddings has another name than those of others."""

    @property
    def embed_tokens(self) -> nn.Embedding:
        table: nn.Embedding = self.embeddings
        return table


def _config(checkpoint: Checkpoint, without: Sequence[str] = ()) -> Any:
    config = checkpoint.config_as(NemotronH_Omni_Reasoning_V3_Config, without)
    config.text_config.base_model_tp_plan = dict(_PLAN)
    return config


FAMILY = TextFamily(
    _config,
    lambda _: TextClasses(NemotronH_Omni_Reasoning_V3, _Text, None),
    TEXT_PREFIXES,
    position_axes=0,
)
# Nemotron Nano 12B v2 VL, whose config describes the tower in other words.
NANO_FAMILY = replace(FAMILY, config=partial(_config, without=["vision_config"]))
