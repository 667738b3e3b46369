"""Towers in the layout of LLaVA 1.5: CLIP, SigLIP, Pixtral or InternViT, a selection of layers, and a projector.

    patches ─▶ embedding ─▶ layer 1 ─▶ … ─▶ layer n        −1 is the last layer's output, before any norm
                   0            1               n

The outputs of the layers in `vision_feature_layer` are joined along the channels and projected; layers after the last
of them are not computed. `default` leaves out the first row of each image: the class token, where there is one.
Source: `LlavaModel.get_image_features` of transformers 5.24, whose classes these are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.clip.modeling_clip import CLIPAttention, CLIPVisionModel
from transformers.models.internvl.modeling_internvl import (
    InternVLVisionEmbeddings,
    InternVLVisionLayer,
    InternVLVisionModel,
)
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector
from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel, PixtralVisionRotaryEmbedding
from transformers.models.siglip.modeling_siglip import SiglipAttention, SiglipVisionModel

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.plan import MediaPlan
from gridsieve.common.fields import Fields
from gridsieve.services.encoder.tower.adapted import linear_layers
from gridsieve.services.encoder.tower.attention import Attend
from gridsieve.services.encoder.tower.packing import PackedLayout, Side, TowerShape
from gridsieve.services.encoder.tower.patches import FoldedPatchEmbed, Normalisation, PatchShape, read_normalisation
from gridsieve.services.encoder.tower.tower import Arrangement, Tower
from gridsieve.services.encoder.tower.vision_model import LoadedModel, RunOptions, TowerModel, assemble
from gridsieve.services.encoder.tower.weights import Stored

_TOWER, _PROJECTOR = "vision_tower.", "multi_modal_projector."
_CLASSES: dict[str, Any] = {
    "clip_vision_model": CLIPVisionModel,
    "siglip_vision_model": SiglipVisionModel,
    "pixtral": PixtralVisionModel,
    "internvl_vision": InternVLVisionModel,
}
# Layers and norms that the model leaves out.
_UNREAD = (f"{_TOWER}post_layernorm.", f"{_TOWER}head.", f"{_TOWER}encoder.layer", f"{_TOWER}transformer.layers.")
_WITH_CLASS_TOKEN = ("clip_vision_model", "internvl_vision")


def load_projected(
    checkpoint: Checkpoint,
    config: Any,
    options: RunOptions,
    *,
    projector: Callable[[Any], nn.Module] = LlavaMultiModalProjector,
    merge: int = 1,
    arrange: Callable[[nn.Module], Callable[[MediaPlan], Arrangement]] | None = None,
    video: Fields | None = None,
) -> Tower:
    """A tower, a selection of its layers and a projector. config: of the whole model.

    projector: makes it of the config. merge: patches per side of a token, which the projector merges. arrange: makes
    `Tower.arrange` of the projector, which the tower then leaves out. video: see `read_normalisation`.
    Raises StartupError if the checkpoint's tower is not supported or incomplete, or the attention is unavailable.
    """
    vision = config.vision_config
    if vision.model_type not in _CLASSES:
        raise StartupError(
            f"vision_config.model_type {vision.model_type!r} is not supported, only {', '.join(_CLASSES)}"
        )
    if getattr(vision, "tie_last_hidden_states", False):
        raise StartupError(
            "vision_config.tie_last_hidden_states true is not supported: the last output is taken before its norm"
        )
    lead = int(vision.model_type in _WITH_CLASS_TOKEN)
    dropped = int(getattr(config, "vision_feature_select_strategy", "full") == "default")
    model = _Llava.on_meta(config, projector, arrange is None)
    patch_px, side = side_of(vision.patch_size), side_of(vision.image_size) // side_of(vision.patch_size)
    fixed = None if vision.model_type == "pixtral" else Side(side, side)
    return assemble(
        checkpoint,
        model,
        options,
        read_normalisation(checkpoint, video),
        patches=PatchShape(patch_px, TowerShape(merge, lead=lead, dropped=dropped, fixed=fixed)),
        embed_dim=config.text_config.hidden_size,
        features=model.features if arrange else None,
        arrange=arrange(model.multi_modal_projector) if arrange else None,
        # A projector that runs outside the forward is no part of it.
        linear={name: each for name, each in model.linear.items() if not (arrange and name.startswith(_PROJECTOR))},
    )


class PassingSiglipAttention(SiglipAttention):
    """CLIP's has the same parts and, other than SigLIP's, passes the ends of sequences on to the attention."""

    forward = CLIPAttention.forward


class _InternVLLayer(InternVLVisionLayer):
    """Passes the ends of sequences on to the attention, which transformers' does not."""

    def forward(self, hidden_states: Tensor, attention_mask: None = None, **keywords: Any) -> Tensor:
        attended, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **keywords)
        hidden_states = hidden_states + self.lambda_1 * attended
        output: Tensor = hidden_states + self.lambda_2 * self.mlp(self.layernorm_after(hidden_states))
        return output


class _Llava(TowerModel):
    """vision_tower: transformers' model without what is not read. embed: patches and their layout, to rows.

    linear: all linear layers by name, also of layers that are not read. projects: whether its forward
        projects the features.
    """

    parts = (_TOWER, _PROJECTOR)
    embed: Any
    unread = _UNREAD
    passing_on = (PassingSiglipAttention, _InternVLLayer)

    def __init__(self, config: Any, projector: Callable[[Any], nn.Module], projects: bool) -> None:
        super().__init__(config.vision_config)
        self.vision_tower: Any = _CLASSES[config.vision_config.model_type](config.vision_config)
        self.patch_embedding = _prefix_of_patches(self.vision_tower)
        self.multi_modal_projector = projector(config)
        self._projects = projects
        self.linear = linear_layers(self)
        count, chosen = len(self.layers), config.vision_feature_layer
        chosen = [chosen] if isinstance(chosen, int) else chosen
        if not chosen or not all(-count - 1 <= layer <= count for layer in chosen):
            raise StartupError(f"vision_feature_layer {chosen} names outputs that a tower of {count} layers lacks")
        self._selected = [layer % (count + 1) for layer in chosen]
        self.features = len(chosen) * config.vision_config.hidden_size
        del self.layers[max(self._selected) :]
        for unread in ("post_layernorm", "head"):
            self._remove(unread)

    @property
    def layers(self) -> nn.ModuleList:
        inner = getattr(self.vision_tower, "encoder", None) or self.vision_tower.transformer
        layers: nn.ModuleList = inner.layer if hasattr(inner, "layer") else inner.layers
        return layers

    def find(self, checkpoint: Checkpoint) -> Mapping[str, Stored]:
        """Published checkpoints have CLIP's and SigLIP's weights one level deeper than transformers 5."""
        found = super().find(checkpoint)
        return {name.replace(f"{_TOWER}vision_model.", _TOWER): each for name, each in found.items()}

    def embed_with(self, loaded: LoadedModel, normalisation: Normalisation) -> None:
        kind = _RotaryEmbedding if hasattr(self.vision_tower, "patch_conv") else _TableEmbedding
        self.embed = kind(self.vision_tower, loaded.folded(normalisation))
        for replaced in ("embeddings", "patch_conv", "patch_positional_embedding"):
            self._remove(replaced)

    def _remove(self, name: str) -> None:
        if hasattr(self.vision_tower, name):
            delattr(self.vision_tower, name)

    def forward(self, patches: Tensor, layout: PackedLayout[Tensor], attend: Attend) -> Tensor:
        """Tokens (T, D), or selected features (T, hidden · selected layers), of patches uint8 (P, values)."""
        rows, keywords = self.embed(patches, layout)
        outputs = [rows[None]]
        for layer in self.layers:
            outputs.append(
                layer(
                    outputs[-1],
                    attention_mask=None,
                    attend=attend,
                    cu_seq_lens_q=layout.ends,
                    max_length_q=layout.longest,
                    **keywords,
                )
            )
        selected = torch.cat([outputs[index][0] for index in self._selected], dim=-1)
        features = selected if layout.token_rows is None else selected[layout.token_rows]
        return self.multi_modal_projector(features) if self._projects else features


def _prefix_of_patches(tower: Any) -> str:
    """The prefix of the weights of a tower's patch embedding."""
    if hasattr(tower, "patch_conv"):
        return f"{_TOWER}patch_conv."
    name = "patch_embedding" if hasattr(tower.embeddings, "patch_embedding") else "patch_embeddings.projection"
    return f"{_TOWER}embeddings.{name}."


class _TableEmbedding(nn.Module):
    """A position embedding for each place of a square grid; CLIP's and InternVL's class token before them."""

    def __init__(self, tower: Any, patch_embed: FoldedPatchEmbed) -> None:
        super().__init__()
        embeddings = tower.embeddings
        class_token: Tensor | None
        if isinstance(embeddings, InternVLVisionEmbeddings):
            table, class_token = embeddings.position_embeddings[0], embeddings.cls_token[0, 0]
        else:
            table = embeddings.position_embedding.weight
            class_token = getattr(embeddings, "class_embedding", None)
        if class_token is not None:
            table = torch.cat([class_token[None] + table[:1], table[1:]])
        self.table = nn.Parameter(table.detach(), requires_grad=False)
        self._first = int(class_token is not None)
        self._side = side_of(embeddings.image_size) // side_of(embeddings.patch_size)
        self.patch_embed = patch_embed
        self.norm = getattr(tower, "pre_layrnorm", nn.Identity())

    def forward(self, patches: Tensor, layout: PackedLayout[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        row, column = layout.positions.unbind(1)
        is_patch = row >= 0
        place = torch.where(is_patch, self._first + row * self._side + column, 0)
        embedded = torch.where(is_patch[:, None], self.patch_embed(patches), 0)
        return self.norm(embedded + self.table[place]), {}


class _RotaryEmbedding(nn.Module):
    """Pixtral's: positions rotate queries and keys in each layer."""

    def __init__(self, tower: Any, patch_embed: FoldedPatchEmbed) -> None:
        super().__init__()
        # Made again off the meta device: its frequencies are computed, not stored.
        self.rotary = PixtralVisionRotaryEmbedding(tower.config)
        self.patch_embed = patch_embed
        self.norm = tower.ln_pre

    def forward(self, patches: Tensor, layout: PackedLayout[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        rows = self.norm(self.patch_embed(patches))
        return rows, {"position_embeddings": self.rotary(rows, layout.positions)}


def side_of(side: int | Sequence[int]) -> int:
    return side if isinstance(side, int) else side[0]
