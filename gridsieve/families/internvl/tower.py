"""InternVL's tower: InternViT, a pixel shuffle of its patches to tokens, and a projector.

Source: `InternVLModel` of transformers 5.24; InternVL 2.5, arXiv 2412.05271.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers import InternVLConfig
from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.fields import Fields
from gridsieve.families.parts.projected import load_projected
from gridsieve.families.parts.tiles import one_after_the_other
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.services.encoder.tower.vision_model import RunOptions


class _Projector(InternVLMultiModalProjector):
    """Takes the patches of a token one after the other, in the order in which transformers' pixel shuffle puts them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._patches = round(1 / config.downsample_ratio) ** 2

    def forward(self, features: Tensor) -> Tensor:
        shuffled = features.unflatten(0, (-1, self._patches)).flatten(1)
        projected: Tensor = super().forward(shuffled)
        return projected


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    config: Any = checkpoint.config_as(InternVLConfig)
    vision = config.vision_config
    if not (vision.use_mean_pooling and vision.use_absolute_position_embeddings) or vision.use_mask_token:
        raise StartupError(
            "vision_config: only mean pooling and absolute positions, without a mask token, are supported"
        )
    if not isinstance(config.vision_feature_layer, int):
        raise StartupError(f"vision_feature_layer {config.vision_feature_layer} is not supported, only one layer")
    if config.vision_feature_select_strategy != "default":
        raise StartupError(
            f"vision_feature_select_strategy {config.vision_feature_select_strategy!r} is not supported, only 'default'"
        )
    for name in ("image_size", "patch_size"):
        if len(set(sides := getattr(vision, name))) > 1:
            raise StartupError(f"vision_config.{name} {list(sides)} is not supported, only squares")
    merge = round(1 / config.downsample_ratio)
    video = _video_settings(checkpoint, vision.image_size[0])
    tower = load_projected(checkpoint, config, options, projector=_Projector, merge=merge, video=video)
    return replace(tower, arrange=partial(one_after_the_other, tower.patches))


def _video_settings(checkpoint: Checkpoint, side_px: int) -> Fields:
    """The video processor's settings, or those of images where its size is not the tower's.

    Published checkpoints of InternVL 3.5 have the defaults of transformers' class in that file, 384 pixels and CLIP's
    mean. transformers fails at frames of that size; the models were trained with videos in the size and mean of images.
    """
    image, video = checkpoint.processor("image"), checkpoint.processor("video")
    return video if set(video.part("size").values()) == {side_px} else image
