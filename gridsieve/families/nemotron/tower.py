"""Nemotron 3 Nano Omni's tower: RADIO over pictures and tubelets of any size, a pixel shuffle, and a projector.

    picture     a frame                          a patch projection ─┐
    tubelet     two frames of a video      another patch projection ─┴▶ layers ─▶ 2 × 2 patches to a token ─▶ projector

Class tokens and registers come before the patches of each slice, attend with them, and become no tokens. A stored
square of positions is laid over the square of a slice's longer side, and the slice takes its upper left part. Where the
language model predicts several tokens, a norm follows the layers.
Source: `NemotronH_Omni_Reasoning_V3` and `RadioModel` of transformers 5.24, whose classes these are; AM-RADIO, arXiv
2312.06709.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.nemotron_h_omni.configuration_nemotron_h_omni import NemotronH_Omni_Reasoning_V3_Config
from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import (
    NemotronH_Omni_Reasoning_V3MultiModalProjector,
)
from transformers.models.radio.modeling_radio import RadioModel

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.families.parts.tables import InterpolatedTable
from gridsieve.services.encoder.tower.attention import Attend
from gridsieve.services.encoder.tower.packing import Array, PackedLayout, Side, TowerShape
from gridsieve.services.encoder.tower.patches import CHANNELS, FoldedPatchEmbed, Normalisation, PatchShape
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.services.encoder.tower.vision_model import LoadedModel, RunOptions, TowerModel, assemble
from gridsieve.services.encoder.tower.weights import Stored, find_weights

_TOWER, _EMBEDDINGS, _LAYERS = "vision_model.", "vision_model.embeddings.", "vision_model.encoder.layer."
# Parts of published checkpoints, and their names in transformers.
_PARTS = {
    _TOWER: _TOWER,
    "multi_modal_projector.": "multi_modal_projector.",
    "mlp1.0.": "multi_modal_projector.layer_norm.",
    "mlp1.1.": "multi_modal_projector.linear_1.",
    "mlp1.3.": "multi_modal_projector.linear_2.",
    "vision_final_layernorm.": "vision_final_layernorm.",
    "vision_projector.vision_final_layernorm.": "vision_final_layernorm.",
}
_PUBLISHED = f"{_TOWER}radio_model."
_RENAMED = {
    f"{_PUBLISHED}model.patch_generator.video_embedder.": f"{_EMBEDDINGS}video_patch_projection.",
    f"{_PUBLISHED}model.patch_generator.embedder.": f"{_EMBEDDINGS}patch_projection.",
    f"{_PUBLISHED}model.patch_generator.pos_embed": f"{_EMBEDDINGS}position_embedding",
    f"{_PUBLISHED}model.patch_generator.cls_token.token": f"{_EMBEDDINGS}cls_register_token",
    f"{_PUBLISHED}model.blocks.": _LAYERS,
    f"{_PUBLISHED}input_conditioner.": f"{_TOWER}input_conditioner.",
    f"{_PUBLISHED}summary_idxs": f"{_TOWER}summary_idxs",
    ".attn.proj.": ".attention.o_proj.",
    ".attn.qkv.": ".attention.qkv.",
}
# Of a norm that changes nothing more.
_FINAL_NORM = {"vision_final_layernorm.weight": 1.0, "vision_final_layernorm.bias": 0.0}
# The processor normalises, and summaries are not read.
_UNREAD = (f"{_TOWER}input_conditioner.", f"{_TOWER}summary_idxs")


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    config = checkpoint.config_as(NemotronH_Omni_Reasoning_V3_Config)
    return load_radio(checkpoint, config, options)


def load_radio(
    checkpoint: Checkpoint, config: Any, options: RunOptions, normalisation: Normalisation | None = None
) -> Tower:
    """A tower of transformers' config of the whole model, which has tubelets if its vision_config has.

    normalisation, and what it raises: see `assemble`.
    """
    vision, merge = config.vision_config, round(1 / config.downsample_ratio)
    frames, lead = vision.video_temporal_patch_size or 1, vision.num_summary_tokens
    table = InterpolatedTable(vision.max_img_size // vision.patch_size, _cell_axis, over_square=True)
    kind = _TubeletShape if frames > 1 else TowerShape
    shape = kind(merge, table=table, lead=lead, dropped=lead)
    return assemble(
        checkpoint,
        _Nemotron.on_meta(config, merge),
        options,
        normalisation,
        patches=PatchShape(vision.patch_size, shape, frames, torch.float32),
        embed_dim=config.text_config.hidden_size,
    )


@dataclass(frozen=True, slots=True)
class _TubeletShape(TowerShape):
    """Of a tower whose pictures have a projection of their own."""

    def by_row(self, sides: Sequence[Side], rows: Sequence[int]) -> Mapping[str, Array]:
        """stills: bool (P,), whether a patch is of a picture."""
        return {"stills": np.repeat([side.still for side in sides for _ in side.times], rows)}


class _Nemotron(TowerModel):
    """Transformers' modules, under their names. merge: patches per side of a token."""

    embed: _Embedding
    layers_at = "vision_model.encoder.layer"
    patch_embedding = _EMBEDDINGS
    unread = _UNREAD

    def __init__(self, config: Any, merge: int) -> None:
        super().__init__(config.vision_config)
        vision, width, text = config.vision_config, config.vision_hidden_size, config.text_config
        self.vision_model: Any = RadioModel(vision)
        del self.vision_model.input_conditioner
        del self.vision_model.summary_idxs
        if text.num_nextn_predict_layers > 0:
            self.vision_final_layernorm: nn.Module = nn.LayerNorm(width, eps=vision.layer_norm_eps)
        else:
            self.vision_final_layernorm = nn.Identity()
        self.multi_modal_projector = NemotronH_Omni_Reasoning_V3MultiModalProjector(
            width * merge**2, config.projector_hidden_size, text.hidden_size
        )
        self._merged = merge**2

    def find(self, checkpoint: Checkpoint) -> dict[str, Stored]:
        """The queries, keys and values of a layer are one weight where they are stored as one."""
        found: dict[str, Stored] = {}
        for part, renamed in _PARTS.items():
            for name, each in find_weights(checkpoint, (part,)).items():
                name = renamed + name
                for before, after in _RENAMED.items():
                    name = name.replace(before, after)
                found[name] = each
        return found

    def complete(self, weights: dict[str, Tensor], device: torch.device) -> None:
        _split(weights)
        # Published checkpoints need not have these: transformers leaves them as they begin.
        values = {"lambda1": self.vision.layerscale_value, **_FINAL_NORM}
        for name, parameter in self.named_parameters():
            value = next((each for end, each in values.items() if name.endswith(end)), None)
            if value is not None and name not in weights:
                weights[name] = torch.full(parameter.shape, value, dtype=torch.float32, device=device)

    def embed_with(self, loaded: LoadedModel, normalisation: Normalisation) -> None:
        self.embed = _embedding(normalisation, self.vision, loaded.weights, loaded.dtype)
        del self.vision_model.embeddings

    def forward(self, patches: Tensor, layout: PackedLayout[Tensor], attend: Attend) -> Tensor:
        """Tokens (T, D) of patches (P, values)."""
        rows = self.embed(patches, layout)[None]
        for layer in self.layers:
            rows = layer(rows, cu_seqlens=layout.ends, max_seqlen=layout.longest, attend=attend)
        features = self.vision_final_layernorm(rows[0][layout.token_rows])
        # The patches of a token are in the order in which transformers' pixel shuffle puts them.
        tokens: Tensor = self.multi_modal_projector(features.unflatten(0, (-1, self._merged)).flatten(1))
        return tokens


class _Embedding(nn.Module):
    """Patches, projected and placed, with the class tokens and registers before them.

    patch_embed: to both projections, (P, 2 · hidden), pictures' before tubelets'; without tubelets to one. positions:
    float32 (side², hidden). before: (rows, hidden).
    """

    def __init__(self, patch_embed: FoldedPatchEmbed, positions: Tensor, before: Tensor) -> None:
        super().__init__()
        self.patch_embed = patch_embed
        self.positions, self.before = (nn.Parameter(each, requires_grad=False) for each in (positions, before))

    def forward(self, patches: Tensor, layout: PackedLayout[Tensor]) -> Tensor:
        projected = self.patch_embed(patches)
        if "stills" in layout.by_row:
            of_picture, of_tubelet = projected.chunk(2, dim=1)
            projected = torch.where(layout.by_row["stills"][:, None], of_picture, of_tubelet)
        entries, weights = layout.by_row["entries"], layout.by_row["weights"]
        places = F.embedding_bag(entries, self.positions, per_sample_weights=weights, mode="sum")
        row, number = layout.positions.unbind(1)
        is_before = row < 0
        before = self.before[torch.where(is_before, number, 0)]
        return torch.where(is_before[:, None], before, projected + places.to(projected.dtype))


def _embedding(
    normalisation: Normalisation, vision: Any, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> _Embedding:
    names = ("patch_projection.weight", "position_embedding", "cls_register_token")
    of_picture, positions, before = (weights[f"{_EMBEDDINGS}{name}"] for name in names)
    square = (vision.patch_size, vision.patch_size)
    projections = of_picture.unflatten(1, (1, CHANNELS, *square)).transpose(1, 2)
    if vision.video_temporal_patch_size:
        of_tubelet = weights[f"{_EMBEDDINGS}video_patch_projection.weight"]
        tubelets = of_tubelet.unflatten(1, (-1, CHANNELS, *square)).transpose(1, 2)
        # Of a picture, which is repeated to a whole patch, the first frame.
        pictures = torch.zeros_like(tubelets)
        pictures[:, :, :1] = projections
        projections = torch.cat([pictures, tubelets])
    patch_embed = FoldedPatchEmbed(projections, None, normalisation, dtype)
    # As transformers does, which interpolates in float32 and rounds the result.
    return _Embedding(patch_embed, positions[0].float(), before.to(dtype))


def _cell_axis(places: Array, length: int, table_side: int) -> tuple[Array, Array]:
    """The two table entries nearest to each place of an axis, and their weights: linear, cell on cell.

    Computed in float32, as `torch.nn.functional.interpolate` does.
    """
    half = np.float32(0.5)
    at = np.maximum(np.float32(table_side) / np.float32(length) * (places.astype(np.float32) + half) - half, 0)
    below = np.floor(at)
    above = (at - below)[:, None]
    entries = np.clip(below.astype(np.int64)[:, None] + np.arange(2), 0, table_side - 1)
    return entries, np.concatenate([1 - above, above], axis=1)


def _split(weights: dict[str, Tensor]) -> None:
    """Splits weights of queries, keys and values that are stored as one."""
    for name in [name for name in weights if ".attention.qkv." in name]:
        for part, own in zip("qkv", weights.pop(name).chunk(3), strict=True):
            weights[name.replace("qkv", f"{part}_proj")] = own
