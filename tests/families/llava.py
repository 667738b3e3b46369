"""Families of LLaVA, and families whose checkpoints are made of the same parts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextVideoConfig,
    LlavaNextVideoForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from demo.checkpoint import TINY, make_tokenizer
from tests.families.family import NORMALISED, ROPE, TEXT, TEXT_FIRST, TOWER, FamilyUnderTest, mark_media, save

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAVA_TEXT: Mapping[str, Any] = {**TEXT, "rope_parameters": _LLAMA3}
_PIXTRAL = {**TOWER, "model_type": "pixtral", "patch_size": 8, "image_size": 96}
_MISTRAL = {"model_type": "mistral", "sliding_window": None, "rope_parameters": ROPE}
# The tower, the text model, and how features are selected, of each kind of LLaVA.
LLAVA: Mapping[str, Mapping[str, Any]] = {
    "llava": {
        "vision_config": {**TOWER, "model_type": "clip_vision_model", "image_size": 56, "projection_dim": 16},
        "text": {"model_type": "llama"},
    },
    "llava_siglip": {
        "vision_config": {**TOWER, "model_type": "siglip_vision_model", "image_size": 60},
        "text": {"model_type": "qwen2", "rope_parameters": ROPE},
        "vision_feature_layer": [-3, -1],
        "vision_feature_select_strategy": "full",
    },
    "llava_pixtral": {
        "vision_config": _PIXTRAL,
        "text": {**_MISTRAL, "head_dim": 24},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "mistral3": {
        "vision_config": _PIXTRAL,
        "text": {**_MISTRAL, "head_dim": 16},
        "vision_feature_layer": -1,
        "spatial_merge_size": 2,
    },
}
_PIXTRAL_PROCESSOR = {
    **NORMALISED,
    "image_processor_type": "PixtralImageProcessor",
    "size": {"longest_edge": 96},
    "patch_size": {"height": 8, "width": 8},
}
LLAVA_PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "llava": {
        **NORMALISED,
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 56},
        "crop_size": {"height": 56, "width": 56},
        "do_center_crop": True,
    },
    "llava_siglip": {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": 60, "width": 60},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "llava_pixtral": _PIXTRAL_PROCESSOR,
    "mistral3": _PIXTRAL_PROCESSOR,
}


def _classes(name: str) -> tuple[Any, Any]:
    if name == "mistral3":
        return Mistral3Config, Mistral3ForConditionalGeneration
    return LlavaConfig, LlavaForConditionalGeneration


def write_llava(folder: Path, seed: int, name: str = "llava") -> Path:
    """A checkpoint of a kind of LLAVA, with the files of its published ones."""
    tokenizer = make_tokenizer(TINY)
    marks = ["<image>"] if name in ("llava", "llava_siglip") else ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    tokenizer.add_tokens(marks, special_tokens=True)
    mark_media(tokenizer, image=marks[0])
    settings, image_id = dict(LLAVA[name]), tokenizer.get_vocab()[marks[0]]
    text = {**LLAVA_TEXT, **settings.pop("text"), "vocab_size": len(tokenizer)}
    config_class, model_class = _classes(name)
    config = config_class(text_config=text, image_token_index=image_id, tie_word_embeddings=False, **settings)
    return save(folder, seed, model_class(config), tokenizer, LLAVA_PROCESSORS[name])


NEWLINE_ID = 330
ONEVISION_PX, ONEVISION_PATCH = 46, 14  # as the published ones: no whole number of patches, and an odd one, 3
ONEVISION = {
    "vision_config": {
        **TOWER,
        "model_type": "siglip_vision_model",
        "image_size": ONEVISION_PX,
        "vision_use_head": False,
    },
    "image_grid_pinpoints": [[ONEVISION_PX * h, ONEVISION_PX * w] for h in (1, 2, 3) for w in (1, 2, 3)],
    "vision_aspect_ratio": "anyres_max_2",
    "vision_feature_layer": -1,
}
NEXT_VIDEO_PX = 56
NEXT_VIDEO = {
    "vision_config": {**TOWER, "model_type": "clip_vision_model", "image_size": NEXT_VIDEO_PX, "projection_dim": 16},
    "image_grid_pinpoints": [
        [NEXT_VIDEO_PX * h, NEXT_VIDEO_PX * w] for h, w in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
    ],
}


def _write_onevision(folder: Path, seed: int) -> Path:
    settings = {"size": {"height": ONEVISION_PX, "width": ONEVISION_PX}}
    classes = LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration
    text = {"model_type": "qwen2", "rope_parameters": ROPE}
    return _write_tiled(folder, seed, classes, ONEVISION, text, settings, "LlavaOnevision")


def _write_next_video(folder: Path, seed: int) -> Path:
    settings = {
        "size": {"shortest_edge": NEXT_VIDEO_PX},
        "crop_size": {"height": NEXT_VIDEO_PX, "width": NEXT_VIDEO_PX},
        "do_center_crop": True,
    }
    classes = LlavaNextVideoConfig, LlavaNextVideoForConditionalGeneration
    return _write_tiled(folder, seed, classes, NEXT_VIDEO, {"model_type": "llama"}, settings, "LlavaNext")


def _write_tiled(
    folder: Path,
    seed: int,
    classes: tuple[Any, Any],
    own: Mapping[str, Any],
    text: Mapping[str, Any],
    settings: Mapping[str, Any],
    name: str,
) -> Path:
    """classes: of config and model. own: fields of the config. settings: of both processors. name: of their classes."""
    tokenizer = make_tokenizer(TINY)
    tokenizer.add_tokens(["<image>", "<video>"], special_tokens=True)
    mark_media(tokenizer, image="<image>", video="<video>")
    assert len(tokenizer) == NEWLINE_ID
    ids = tokenizer.get_vocab()
    text = {**LLAVA_TEXT, **text, "vocab_size": len(tokenizer)}
    tokens = {f"{kind}_token_index": ids[f"<{kind}>"] for kind in ("image", "video")}
    config_class, model_class = classes
    model = model_class(config_class(text_config=text, tie_word_embeddings=False, **tokens, **own))
    settings = {**NORMALISED, **settings}
    pinpoints = {"image_grid_pinpoints": own["image_grid_pinpoints"]}
    image = {**settings, **pinpoints, "image_processor_type": f"{name}ImageProcessor"}
    return save(folder, seed, model, tokenizer, image, {**settings, "video_processor_type": f"{name}VideoProcessor"})


def _side(vision: Mapping[str, Any]) -> int:
    return 0 if vision["model_type"] == "pixtral" else vision["image_size"] // vision["patch_size"]


_STORED = {NEWLINE_ID: lambda whole: whole.model.image_newline}
_TILED: dict[str, Any] = {**TEXT_FIRST, "merge": 1, "rows_stand_alone": True, "stored": _STORED}
FAMILIES = {
    **{
        name: FamilyUnderTest(
            partial(write_llava, name=name),
            _classes(name)[1],
            patch_px=settings["vision_config"]["patch_size"],
            merge=settings.get("spatial_merge_size", 1),
            rows_stand_alone=settings["vision_config"]["model_type"] == "pixtral",
            side=_side(settings["vision_config"]),
            model_type=name if name == "mistral3" else "llava",
            **TEXT_FIRST,
        )
        for name, settings in LLAVA.items()
    },
    "llava_next_video": FamilyUnderTest(_write_next_video, LlavaNextVideoForConditionalGeneration, side=4, **_TILED),
    "llava_onevision": FamilyUnderTest(_write_onevision, LlavaOnevisionForConditionalGeneration, side=3, **_TILED),
}
