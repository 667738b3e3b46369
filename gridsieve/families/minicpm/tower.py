"""MiniCPM-V's towers, 2.5 to 4.5: SigLIP over pictures of any size, and a resampler that makes tokens of each.

A patch takes the stored position of the cell of a square grid in which it begins. In 2.5 all patches of a picture are
one row, and take positions of the grid's first row. Pictures are packed; none is padded. Patches begin at
`arange(0, 1 - 1e-6, 1 / n)` in float32, and so is its step, as in the published code and in transformers 4.40, whose
tower 2.5 has; transformers 5 computes them otherwise, which rounds to another cell for some numbers of patches.
4.5 makes as many tokens of a group of frames as of a picture; each frame's time is the nearest tenth of a second.
Source: the published `modeling_navit_siglip.py`, `resampler.py` and README of openbmb/MiniCPM-V-2_6 and MiniCPM-V-4_5,
`modeling_minicpmv.py` of openbmb/MiniCPM-Llama3-V-2_5, and `Idefics2VisionTransformer` of transformers 4.40.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers.models.siglip.configuration_siglip import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import MediaPlan, Modality
from gridsieve.families.minicpm.cells import Cells
from gridsieve.families.minicpm.resampler import Resampler, ResamplerShape, as_linear_layers
from gridsieve.families.minicpm.versions import queries_of, version_of
from gridsieve.families.parts.projected import PassingSiglipAttention, side_of
from gridsieve.families.parts.tiles import check_plan
from gridsieve.services.encoder.tower.attention import Attend, Resampling
from gridsieve.services.encoder.tower.packing import PackedLayout
from gridsieve.services.encoder.tower.patches import Normalisation, PatchShape
from gridsieve.services.encoder.tower.tower import Arrangement, Tower, TowerSizes, linear_weights
from gridsieve.services.encoder.tower.vision_model import LoadedModel, RunOptions, TowerModel, assemble

# The version whose slices are groups of frames.
_GROUPING = "4.5"
# The version whose code tells its tower only how many patches a picture has.
_IN_A_ROW = "2.5"
_TENTH_S = 0.1


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    config, version = checkpoint.config, version_of(checkpoint.config)
    vision = checkpoint.config_as(SiglipVisionConfig, part="vision_config")
    if config.get("drop_vision_last_layer", False):
        vision.num_hidden_layers -= 1
    queries, width = queries_of(config), config.whole("hidden_size")
    patch_px, timed = side_of(vision.patch_size), version == _GROUPING
    cells = Cells(side_of(vision.image_size) // patch_px, in_a_row=version == _IN_A_ROW)

    def arrange(plan: MediaPlan) -> Arrangement:
        frames, is_video = plan.frames, plan.modality is Modality.VIDEO
        slices = -(-frames.count // (frames.group_frames or plan.pictures))
        check_plan(plan, (slices, plan.pictures, queries), frames.count)
        if bool(frames.group_frames) != (timed and is_video):
            raise ValueError(f"groups of {frames.group_frames} frames are not this version's")
        if any(side % patch_px for index in (0, 1) for side in frames.frame_px(index)):
            raise ValueError(f"sides of {frames.frame_px(0)} and {frames.frame_px(1)} are no multiples of {patch_px}")
        return Arrangement(queries, times=tuple(map(time_number, plan.timestamps_s)) if timed else ())

    return assemble(
        checkpoint,
        _MiniCPMV.on_meta(vision, queries, width),
        options,
        patches=PatchShape(patch_px, ResamplerShape(1, table=cells, queries=queries, timed=timed)),
        embed_dim=width,
        arrange=arrange,
    )


def time_number(time_s: float) -> int:
    """The number of the nearest tenth of a second, as the published code computes it: 4.3 / 0.1 is 42 there."""
    about = math.floor(time_s / _TENTH_S)
    nearest = min((about, about + 1), key=lambda number: abs(time_s - number * _TENTH_S))
    return int(nearest * _TENTH_S / _TENTH_S)


class _MiniCPMV(TowerModel):
    """vpm: transformers' SigLIP without its head. places: stored positions, (cells, hidden)."""

    places: Tensor
    parts = ("vpm.", "resampler.")
    layers_at = "vpm.encoder.layers"
    patch_embedding = "vpm.embeddings.patch_embedding."
    unread = ("vpm.encoder.",)
    passing_on = (PassingSiglipAttention,)

    def __init__(self, vision: SiglipVisionConfig, queries: int, width: int) -> None:
        super().__init__(vision)
        vision.vision_use_head = False
        self.vpm = SiglipVisionModel(vision)
        self.resampler = Resampler(queries, width, vision.hidden_size)
        self.resampling = Resampling(queries, self.resampler.attn.num_heads, self.resampler.attn.head_dim)

    def complete(self, weights: dict[str, Tensor], device: torch.device) -> None:
        as_linear_layers(weights)

    def embed_with(self, loaded: LoadedModel, normalisation: Normalisation) -> None:
        super().embed_with(loaded, normalisation)
        self.places = self.vpm.embeddings.position_embedding.weight
        del self.vpm.embeddings

    def sizes(self) -> TowerSizes:
        in_layers = linear_weights(self.vpm.encoder)
        hidden, values = self.patch_embed.weight.shape
        width = self.resampler.proj.out_features
        # Of each patch also its key and its value.
        patch_weights = in_layers + hidden * values + hidden * width + 2 * width**2
        return TowerSizes(hidden, patch_weights, 0, len(self.layers))

    def forward(self, patches: Tensor, layout: PackedLayout[Tensor], attend: Attend) -> Tensor:
        """Tokens (S · queries, D) of patches uint8 (P, values)."""
        rows = self.patch_embed(patches) + self.places[layout.by_row["cells"]]
        states = self.run_layers(rows[None], layout, attend)
        features = self.vpm.post_layernorm(states)[0]
        tokens: Tensor = self.resampler(features, layout, attend)
        return tokens
