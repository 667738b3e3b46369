"""Nemotron Nano 12B v2 VL: tiny checkpoints in its published layout, and their weights in the Omni's class.

transformers has no class for it. To the Omni, its tiles are images, and its frames tubelets whose second frame has
weights of zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, NemotronH_Omni_Reasoning_V3_Config

from tests.families import nemotron
from tests.families.family import FamilyUnderTest

MODEL_TYPE = "NemotronH_Nano_VL_V2"
SIDE_PX, MAX_TILES = 64, 6
_LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}
_LAYERS = ["linear_attention", "mlp", "linear_attention", "full_attention", "linear_attention", "full_attention", "mlp"]
# Three teachers, of which two share a row, and registers to a multiple: as many rows as `nemotron.VISION` has.
_RADIO: Mapping[str, Any] = {
    "model": "vit_huge_patch16_224",
    "model_kwargs": {
        "embed_dim": nemotron.VISION["hidden_size"],
        "depth": nemotron.VISION["num_hidden_layers"],
        "num_heads": nemotron.VISION["num_attention_heads"],
        "mlp_ratio": nemotron.VISION["mlp_ratio"],
    },
    "cpe_max_size": nemotron.VISION["max_img_size"],
    "cls_token_per_teacher": True,
    "teachers": [{"name": "clip"}, {"name": "siglip"}, {"name": "dino"}, {"name": "clip"}],
    "register_multiple": 10,
}


def write(
    folder: Path, seed: int, text: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None
) -> None:
    """Writes a checkpoint with random float32 weights. text, config: what differs of its text config and its config."""
    nemotron.write(folder, seed, {"layers_block_type": _LAYERS, **(text or {})}, {"audio_config": None})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.get_vocab()
    tokenizer.add_tokens(["<video>"], special_tokens=True)  # which the model's embeddings lack
    tokenizer.save_pretrained(folder)
    of_text = json.loads((folder / "config.json").read_text())["text_config"]
    pattern = "".join(_LETTERS[each] for each in of_text.pop("layers_block_type"))
    names = {name: [f"{name}.NemotronH"] for name in ("AutoConfig", "AutoModel")}
    fields: dict[str, Any] = {
        "model_type": MODEL_TYPE,
        "architectures": [MODEL_TYPE],
        "auto_map": names,
        "llm_config": {**of_text, "hybrid_override_pattern": pattern},
        "vision_config": {"args": _RADIO, "patch_size": nemotron.PATCH_PX, "preferred_resolution": [64, 64]},
        "force_image_size": SIDE_PX,
        "patch_size": nemotron.PATCH_PX,
        "downsample_ratio": 1 / nemotron.MERGE,
        "ps_version": "v2",
        "use_thumbnail": True,
        "image_tag_type": "internvl",
        "template": None,
        "attn_implementation": "flash_attention_2",
        "torch_dtype": "float32",
        "vit_hidden_size": nemotron.VISION["hidden_size"],
        "projector_hidden_size": 80,
        "img_context_token": "<image>",
        "img_context_token_id": ids["<image>"],
        "img_start_token": "<img>",
        "img_end_token": "</img>",
        "video_context_token": "<video>",
        "video_context_token_id": len(ids),
        "tie_word_embeddings": False,
        **{name: nemotron.SETTINGS[name] for name in ("norm_mean", "norm_std")},
        **(config or {}),
    }
    (folder / "config.json").write_text(json.dumps(fields))
    # As transformers' base class saves a processor of the checkpoint's own code.
    unset = dict.fromkeys(("do_normalize", "do_resize", "image_mean", "image_std", "resample", "size"))
    (folder / "preprocessor_config.json").write_text(json.dumps({"max_num_tiles": MAX_TILES, **unset}))
    path = folder / "model.safetensors"
    weights = {name: each for name, each in load_file(path).items() if "video_embedder" not in name}
    for unread in ("input_conditioner.norm_mean", "input_conditioner.norm_std"):
        weights[f"vision_model.radio_model.{unread}"] = torch.ones(3, 1, 1)
    weights["vision_model.radio_model.summary_idxs"] = torch.arange(2)
    save_file(weights, path, {"format": "pt"})


def read(folder: Path) -> Any:
    """The Omni with the weights of a checkpoint, in float32 with plain attention."""
    fields, _ = NemotronH_Omni_Reasoning_V3_Config.get_config_dict(folder)
    config = NemotronH_Omni_Reasoning_V3_Config.from_dict(fields | {"vision_config": dict(nemotron.VISION)})
    model = nemotron.MODEL.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager")
    embeddings = model.vision_model.embeddings
    of_frame = embeddings.patch_projection.weight
    embeddings.video_patch_projection.weight.data = torch.cat([of_frame, torch.zeros_like(of_frame)], dim=1)
    return model.eval()


def _written(folder: Path, seed: int) -> Path:
    write(folder, seed)
    return folder


FAMILIES: Mapping[str, FamilyUnderTest] = {
    "nemotron_nano_vl": FamilyUnderTest(
        _written,
        nemotron.MODEL,
        patch_px=nemotron.PATCH_PX,
        merge=nemotron.MERGE,
        slices_stand_alone=True,
        text_prefix="language_model.backbone.",
        lm_head="language_model.lm_head.weight",
        linear=True,
        side=SIDE_PX // nemotron.PATCH_PX // nemotron.MERGE,
        model_type=MODEL_TYPE,
    )
}
