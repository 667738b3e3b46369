"""Multi-token prediction of Qwen3.5 and its line: a decoder layer of the checkpoint's own that drafts for its model.

    row i:  fc [ norm(embedding of token i + 1) | norm(hidden states of token i) ] ─▶ layer ─▶ norm ─▶ output layer

Hidden states are what the model's output layer reads, after the model's last norm. A drafted row, for which the model
has computed none, takes the output of the row before, after `norm`. The layer is built as one of the model's layers
with full attention, and has the position of token i. Embedding and output layer are the model's.

It has the attributes of a text model of one layer, so that it can be made ready as one.
Sources: arXiv 2412.19437, section 2.2, without its second embedding and head; weights `mtp.*` of Qwen/Qwen3.5-9B and
Qwen/Qwen3.5-35B-A3B; what their hidden states are: `qwen3_5_mtp.py` of vLLM and of SGLang, and llama.cpp's pull request
24025, which measured it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gridsieve.services.generation.model.attention.cache import Batch
from gridsieve.services.generation.model.draft_head import DraftHead, DraftSizes, Turns
from gridsieve.services.generation.model.fused_layers import RotaryTable


class MtpHead(DraftHead):
    """Weights have the names of the checkpoint. text: the text model of transformers that it drafts for."""

    rotary_emb: nn.Module
    lm_head: nn.Module

    def __init__(self, sizes: DraftSizes, text: Any) -> None:
        super().__init__(sizes)
        self.config = config = text.config
        norm, width = type(text.norm), config.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            norm(width, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.fc = nn.Linear(2 * width, width, bias=False)
        alike = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([type(text.layers[alike])(config, alike)])

    def turns(self, positions: Tensor) -> Turns:
        """float32."""
        rotary = self.rotary_emb.rotary if isinstance(self.rotary_emb, RotaryTable) else self.rotary_emb
        cos, sin = rotary(torch.empty(0, device=positions.device), positions[:, None])
        return Turns(cos[0], sin[0])

    def forward(self, embeds: Tensor, hidden: Tensor, turns: Turns, batch: Batch | None = None) -> Tensor:
        both = torch.cat([self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)], dim=-1)
        rows = self.fc(both)[None]
        if isinstance(self.rotary_emb, RotaryTable):
            rotations = RotaryTable.of(*turns)
        else:
            rotations = turns.cos[None].to(rows.dtype), turns.sin[None].to(rows.dtype)
        rows = self.layers[0](rows, position_embeddings=rotations, batch=batch)
        output: Tensor = self.norm(rows)[0]
        return output

    def joined(self, states: Sequence[Tensor]) -> Tensor:
        return states[0]

    def draft(self, rows: Tensor) -> Tensor:
        best: Tensor = self.lm_head(rows).argmax(dim=-1)
        return best
