"""Nemotron Nano 12B v2 VL's tower: that of Nemotron 3 Nano Omni, over frames and tiles of one size, one frame a patch.

Its config names RADIO's architecture as timm does and counts the rows before the patches by RADIO's teachers.
Source: `NemotronH_Nano_VL_V2`, `RadioModel` and `RadioConfig` of vLLM 0.32; RADIO's own `create_model_from_args`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from transformers.models.nemotron_h_omni.configuration_nemotron_h_omni import NemotronH_Omni_Reasoning_V3_Config
from transformers.models.radio.configuration_radio import RadioConfig

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.fields import Fields
from gridsieve.families.nemotron.tower import load_radio
from gridsieve.families.parts.tiles import one_after_the_other
from gridsieve.services.encoder.tower.patches import CHANNELS, Normalisation
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.services.encoder.tower.vision_model import RunOptions

# timm's names: width, layers and heads. An MLP is four times as wide.
_ARCHITECTURES = {
    "vit_small_patch16_224": (384, 12, 6),
    "vit_base_patch16_224": (768, 12, 12),
    "vit_large_patch16_224": (1024, 24, 16),
    "vit_huge_patch16_224": (1280, 32, 16),
}


def load(checkpoint: Checkpoint, options: RunOptions) -> Tower:
    config: Any = checkpoint.config_as(NemotronH_Omni_Reasoning_V3_Config, without=["vision_config"])
    config.vision_config = _radio(checkpoint.config)
    if (version := getattr(config, "ps_version", "v2")) != "v2":
        raise StartupError(f"ps_version {version!r} is not supported, only 'v2'")
    mean, std = (checkpoint.config.numbers(f"norm_{name}", CHANNELS) for name in ("mean", "std"))
    tower = load_radio(checkpoint, config, options, Normalisation(1 / 255, mean, std))
    return replace(tower, arrange=partial(one_after_the_other, tower.patches))


def _radio(config: Fields) -> RadioConfig:
    """`vision_config` as that of transformers. Raises StartupError for an architecture that is not known."""
    args = config.part("vision_config").part("args")
    name, own = args["model"], args.part("model_kwargs")
    if name not in _ARCHITECTURES:
        raise StartupError(f"vision_config.args.model {name!r} is not supported, only {', '.join(_ARCHITECTURES)}")
    hidden, layers, heads = _ARCHITECTURES[name]
    classes = len({each["name"] for each in args.get("teachers", ())}) if args.get("cls_token_per_teacher") else 1
    multiple = args.get("register_multiple")
    return RadioConfig(
        hidden_size=own.whole("embed_dim", hidden),
        num_hidden_layers=own.whole("depth", layers),
        num_attention_heads=own.whole("num_heads", heads),
        mlp_ratio=own.number("mlp_ratio", 4),
        patch_size=config.whole("patch_size", 16),
        max_img_size=args.whole("cpe_max_size", 2048),
        num_cls_tokens=classes,
        # A whole group of them where the class tokens fill theirs.
        num_registers=args.get("cpe_num_registers") or (multiple - classes % multiple if multiple else 0),
    )
