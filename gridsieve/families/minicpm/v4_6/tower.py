"""The tower of MiniCPM-V 4.6 and 4.7: SigLIP over pictures of any size, in which 2 × 2 patches become one after the
first layers, and 2 × 2 of these one token after the last.

    patches ─▶ layers 0 … insert_layer_id ─▶ windows of 2 × 2 ─▶ the other layers ─▶ norm ─▶ 2 × 2 to a token   16x
    patches ─▶ all layers ───────────────────────────────────────────────────────▶ norm ─▶ 2 × 2 to a token    4x

The patches of a token are packed one after the other, so a window is some rows of its token, which no other token's
patches enter. A patch takes the stored position of the cell of a square grid in which it begins.
Source: `MiniCPMV4_6Model` and `MiniCPMV4_7Model` of transformers 5.24, whose towers are the same.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import MiniCPMV4_6Config, MiniCPMV4_7Config
from transformers.models.minicpmv4_6.modeling_minicpmv4_6 import (
    MiniCPMV4_6Merger,
    MiniCPMV4_6VisionModel,
    MiniCPMV4_6ViTWindowAttentionMerger,
)

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.plan import MediaPlan, Modality
from gridsieve.families.minicpm.cells import Cells
from gridsieve.families.minicpm.versions import merged_side
from gridsieve.families.parts.projected import side_of
from gridsieve.families.parts.tiles import check_plan
from gridsieve.services.encoder.tower.adapted import linear_layers
from gridsieve.services.encoder.tower.attention import Attend
from gridsieve.services.encoder.tower.packing import PackedLayout, TowerShape
from gridsieve.services.encoder.tower.patches import Normalisation, PatchShape
from gridsieve.services.encoder.tower.tower import Arrangement, Tower, TowerSizes, linear_weights
from gridsieve.services.encoder.tower.vision_model import LoadedModel, RunOptions, TowerModel, assemble

_CONFIGS = {"minicpmv4_6": MiniCPMV4_6Config, "minicpmv4_7": MiniCPMV4_7Config}
# Patches per side of a window, and in it.
_WINDOW_SIDE, _WINDOW = 2, 4
_MERGED_TWICE = 4


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    config: Any = checkpoint.config_as(_CONFIGS[checkpoint.model_type])
    vision, merge = config.vision_config, merged_side(checkpoint.config)
    patch_px = side_of(vision.patch_size)
    cells = Cells(side_of(vision.image_size) // patch_px, by_quotient=True)
    patches = PatchShape(patch_px, TowerShape(merge, table=cells))
    model = _MiniCPMV46.on_meta(config, merge == _MERGED_TWICE)
    return assemble(
        checkpoint,
        model,
        options,
        patches=patches,
        embed_dim=config.text_config.hidden_size,
        arrange=lambda plan: _arrange(plan, patches),
        linear=model.linear,
    )


def _arrange(plan: MediaPlan, patches: PatchShape) -> Arrangement:
    """`Tower.arrange`: a video's frames are grids; of an image the whole may have other tokens than each slice."""
    frames = plan.frames
    whole, slice_ = (patches.grid(*frames.frame_px(index)) for index in (0, 1))
    if whole is None or slice_ is None or frames.group_frames:
        raise ValueError(f"sides of {frames.frame_px(0)} and {frames.frame_px(1)} are no multiples of a token")
    first_tokens, slice_tokens = math.prod(whole), math.prod(slice_)
    if plan.modality is Modality.VIDEO or frames.count == 1:
        check_plan(plan, (plan.grid.t, *whole), plan.grid.t)
    else:
        check_plan(plan, (1, 1, first_tokens + (frames.count - 1) * slice_tokens), frames.count)
    return Arrangement(slice_tokens, first_tokens)


class _MiniCPMV46(TowerModel):
    """vision_tower, merger: transformers'. windows: whether patches are merged between layers, too.

    places: stored positions, (cells, hidden). linear: all linear layers by name, also those that are not read.
    """

    places: Tensor
    parts = ("vision_tower.", "merger.")
    layers_at = "vision_tower.encoder.layers"
    patch_embedding = "vision_tower.embeddings.patch_embedding."
    unread = ("vision_tower.vit_merger.",)

    def __init__(self, config: Any, windows: bool) -> None:
        super().__init__(config.vision_config)
        self.vision_tower = MiniCPMV4_6VisionModel(config.vision_config)
        self.merger = MiniCPMV4_6Merger(config)
        self.linear = linear_layers(self)
        self._merged_after = config.insert_layer_id if windows else None
        if not windows:
            del self.vision_tower.vit_merger
        elif not 0 <= config.insert_layer_id < len(self.layers):
            raise StartupError(
                f"insert_layer_id {config.insert_layer_id} is none of the tower's {len(self.layers)} layers"
            )

    def embed_with(self, loaded: LoadedModel, normalisation: Normalisation) -> None:
        super().embed_with(loaded, normalisation)
        self.places = self.vision_tower.embeddings.position_embedding.weight
        del self.vision_tower.embeddings

    def sizes(self) -> TowerSizes:
        """The layers after the windows, and the linear layers that merge these, apply to four rows of each token."""
        hidden, values = self.patch_embed.weight.shape
        first = len(self.layers) if self._merged_after is None else self._merged_after + 1
        each, later = linear_weights(self.layers[0]), len(self.layers) - first
        patch_weights, token_weights = hidden * values + first * each, linear_weights(self.merger)
        if self._merged_after is None:
            return TowerSizes(hidden, patch_weights, token_weights, first)
        merger = self.vision_tower.vit_merger
        in_windows = linear_weights(merger.self_attn)
        return TowerSizes(
            hidden=hidden,
            patch_weights=patch_weights + in_windows,
            token_weights=token_weights + _WINDOW * (linear_weights(merger) - in_windows + later * each),
            full_layers=first + Fraction(later, _WINDOW**2),
            windowed_layers=1,
            window_patches=_WINDOW,
        )

    def forward(self, patches: Tensor, layout: PackedLayout[Tensor], attend: Attend) -> Tensor:
        """Tokens (T, D) of patches uint8 (P, values)."""
        rows = self.patch_embed(patches) + self.places[layout.by_row["cells"]]
        ends, longest = layout.ends, layout.longest
        for index, layer in enumerate(self.layers):
            rows = layer(rows[None], None, cu_seqlens=ends, max_seqlen=longest, attend=attend)[0]
            if index == self._merged_after:
                rows = _merged(rows, self.vision_tower.vit_merger)
                ends, longest = ends // _WINDOW, longest // _WINDOW
        (last,) = self.merger.mlp
        tokens: Tensor = last(self.vision_tower.post_layernorm(rows).unflatten(0, (-1, 4)).flatten(1))
        return tokens


def _merged(rows: Tensor, merger: MiniCPMV4_6ViTWindowAttentionMerger) -> Tensor:
    """One row for each window, (P / 4, hidden), of the patches of tokens, (P, hidden).

    merger: its layers are called here, because transformers looks for windows in pictures row by row.
    """
    # (token, row of windows, row, column of windows, column, hidden): a token has 4 × 4 patches in 2 × 2 windows
    tokens = rows.unflatten(0, (-1, *(_WINDOW_SIDE,) * 4))
    windows = tokens.transpose(2, 3).reshape(-1, _WINDOW, rows.shape[-1])
    attention: Any = merger.self_attn
    normed = merger.layer_norm1(windows)
    query, key, value = (
        project(normed).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    windows = windows + attention.out_proj(attended)
    hidden = merger.act(merger.linear_1(merger.pre_norm(windows.flatten(1))))
    merged: Tensor = merger.linear_2(hidden) + windows.mean(1)
    return merged
