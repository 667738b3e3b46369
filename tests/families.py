"""Model families for tests: tiny random checkpoints, and the classes of transformers to compare with.

The names in FAMILIES must be those of the registry of each service. This module does not import the services.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Cosmos3EdgeForConditionalGeneration,
    GenerationConfig,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm46VConfig,
    Glm46VForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextVideoConfig,
    LlavaNextVideoForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    VideoLlama3Config,
    VideoLlama3ForConditionalGeneration,
)

from demo.checkpoint import TINY, make_tokenizer, randomise, write_checkpoint
from tests import cosmos3_edge, minicpm, minicpmv4_6
from tests.recurrent import as_trained


@dataclass(frozen=True)
class FamilyUnderTest:
    """Properties of a family.

    write: makes a tiny random float32 checkpoint in a folder, from a seed.
    model: the class of transformers for the whole model; of MiniCPM-V, which it has not, for the language model.
    levels: number of tensors that a media token carries beside its embedding (DeepStack).
    slices_stand_alone: each temporal slice is a grid of its own, with text before and after it.
    text_prefix, lm_head: prefix of the names of the text model's weights in that checkpoint, and its output layer's.
    linear: positions are one-dimensional.
    rows_stand_alone: an image's rows, or its tiles, have text between them.
    newline_id: of the stored vector after rows of an image and after a video: the id after the vocabulary.
    channels_last: a patch's values are in the order y, x, channel.
    model_type: of its config.json, where that is not its name in FAMILIES.
    """

    write: Callable[[Path, int], Path]
    model: Any
    patch_px: int
    merge: int
    temporal_patch: int
    hidden: int
    levels: int
    slices_stand_alone: bool
    text_prefix: str
    linear: bool = False
    rows_stand_alone: bool = False
    newline_id: int | None = None
    channels_last: bool = False
    model_type: str = ""
    lm_head: str = "lm_head.weight"

    @property
    def token_px(self) -> int:
        return self.patch_px * self.merge


QWEN3_VL: dict[str, dict[str, Any]] = {
    "text": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
    "vision": {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 2],
        "out_hidden_size": 64,
    },
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


QWEN2_VL: dict[str, dict[str, Any]] = {
    "text": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    },
    "vision": {
        "depth": 3,
        "embed_dim": 32,
        "hidden_size": 64,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


def _write_qwen2_vl(folder: Path, seed: int) -> Path:
    sizes = {"size": {"shortest_edge": 56 * 56, "longest_edge": 168 * 168}}
    return _write_qwen(
        folder, seed, Qwen2VLConfig, Qwen2VLForConditionalGeneration, QWEN2_VL, (sizes, sizes), "Qwen2VL"
    )


def _write_qwen3_vl(folder: Path, seed: int) -> Path:
    return _write_qwen3(folder, seed, Qwen3VLConfig, Qwen3VLForConditionalGeneration, {})


def write_qwen3_vl_moe(folder: Path, seed: int, moe_intermediate: int = 48) -> Path:
    """`write` of the family with experts of this width."""
    experts = {**EXPERTS, "moe_intermediate_size": moe_intermediate}
    return _write_qwen3(folder, seed, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration, experts)


def write_qwen3_vl_heads(folder: Path, seed: int, heads: int, kv_heads: int, head_dim: int) -> Path:
    """`write` of the family with heads of a size that kernels for cards have, in two layers."""
    rope = {**QWEN3_VL["text"]["rope_parameters"], "mrope_section": [head_dim // 4, head_dim // 8, head_dim // 8]}
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    text = {**sizes, "num_hidden_layers": 2, "rope_parameters": rope}
    return _write_qwen3(folder, seed, Qwen3VLConfig, Qwen3VLForConditionalGeneration, text)


def _write_qwen3(folder: Path, seed: int, config_class: Any, model_class: Any, text: Mapping[str, Any]) -> Path:
    sizes = {**QWEN3_VL, "text": {**QWEN3_VL["text"], **text}}
    images = {"size": {"shortest_edge": 64 * 64, "longest_edge": 192 * 192}}
    videos = {"size": {"shortest_edge": 4 * 64 * 64, "longest_edge": 16 * 128 * 128}}
    return _write_qwen(folder, seed, config_class, model_class, sizes, (images, videos), "Qwen3VL")


# Attention layers between others with a recurrent state, twice as many value heads as key heads.
QWEN3_5: dict[str, dict[str, Any]] = {
    "text": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
    "vision": {name: size for name, size in QWEN3_VL["vision"].items() if name != "deepstack_visual_indexes"},
}
EXPERTS_3_5 = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}


def write_qwen3_5(folder: Path, seed: int, text: Mapping[str, Any] | None = None) -> Path:
    """text: what differs of its text config."""
    return _write_qwen3_5(folder, seed, Qwen3_5Config, Qwen3_5ForConditionalGeneration, text or {})


def write_qwen3_5_moe(folder: Path, seed: int) -> Path:
    return _write_qwen3_5(folder, seed, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, EXPERTS_3_5)


def _write_qwen3_5(folder: Path, seed: int, config_class: Any, model_class: Any, text: Mapping[str, Any]) -> Path:
    sizes = {**QWEN3_5, "text": {**QWEN3_5["text"], **text}}
    images = {"size": {"shortest_edge": 64 * 64, "longest_edge": 192 * 192}}
    videos = {"size": {"shortest_edge": 4 * 64 * 64, "longest_edge": 16 * 128 * 128}}
    return _write_qwen(folder, seed, config_class, model_class, sizes, (images, videos), "Qwen3VL")


def write_minicpmv4_6(folder: Path, seed: int, model_type: str = "minicpmv4_6", mode: str = "16x") -> Path:
    """mode: downsample_mode of tower and processors."""
    minicpmv4_6.write(folder, seed, QWEN3_5["text"], model_type, mode)
    return folder


def _write_qwen(
    folder: Path,
    seed: int,
    config_class: Any,
    model_class: Any,
    sizes: Mapping[str, Mapping[str, Any]],
    processors: tuple[Mapping[str, Any], Mapping[str, Any]],
    name: str,
) -> Path:
    """sizes: of text and vision. processors: settings of images and of videos. name: that classes begin with."""
    tokenizer = make_tokenizer(TINY)
    ids = tokenizer.get_vocab()
    config = config_class(
        text_config={**sizes["text"], "vocab_size": len(tokenizer)},
        vision_config=sizes["vision"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    model = model_class(config)
    randomise(model, 0.1, seed)
    if "layer_types" in sizes["text"]:
        as_trained(model)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]])
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = {
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": sizes["vision"]["patch_size"],
        "merge_size": 2,
        "temporal_patch_size": 2,
        "processor_class": f"{name}Processor",
    }
    image, video = processors
    image = {**processor, **image, "image_processor_type": "Qwen2VLImageProcessor"}
    video = {**processor, **video, "video_processor_type": f"{name}VideoProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    return folder


# Half of each head is rotated.
GLM: dict[str, dict[str, Any]] = {
    "text": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 2],
        },
    },
    "vision": {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 14,
        "image_size": 70,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
    },
}
# Two groups of experts, one of which is chosen first; a dense layer before those with experts.
GLM_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}
_GLM_CLASSES: Mapping[str, tuple[Any, Any, str]] = {
    "glm4v": (Glm4vConfig, Glm4vForConditionalGeneration, "Glm4v"),
    "glm46v": (Glm46VConfig, Glm46VForConditionalGeneration, "Glm46V"),
    "glm4v_moe": (Glm4vMoeConfig, Glm4vMoeForConditionalGeneration, "Glm4v"),
}
GLM_TOKENS = {each: [f"<|begin_of_{each}|>", f"<|{each}|>", f"<|end_of_{each}|>"] for each in ("image", "video")}


def _write_glm(folder: Path, seed: int, name: str) -> Path:
    """With the names and processors of published checkpoints, whose template begins with two control tokens."""
    tokenizer, (config_class, model_class, processors) = make_tokenizer(TINY), _GLM_CLASSES[name]
    tokenizer.add_tokens(["[gMASK]", "<sop>", *GLM_TOKENS["image"], *GLM_TOKENS["video"]], special_tokens=True)
    template = f"[gMASK]<sop>{tokenizer.chat_template}"
    for kind, tokens in GLM_TOKENS.items():
        template = template.replace(f"<|vision_start|><|{kind}_pad|><|vision_end|>", "".join(tokens))
    tokenizer.chat_template = template
    ids = tokenizer.get_vocab()
    experts = GLM_EXPERTS if name == "glm4v_moe" else {}
    config = config_class(
        text_config={**GLM["text"], **experts, "vocab_size": len(tokenizer)},
        vision_config=GLM["vision"],
        **{f"{kind}_token_id": ids[f"<|{kind}|>"] for kind in GLM_TOKENS},
        **{f"{kind}_start_token_id": ids[f"<|begin_of_{kind}|>"] for kind in GLM_TOKENS},
        **{f"{kind}_end_token_id": ids[f"<|end_of_{kind}|>"] for kind in GLM_TOKENS},
        tie_word_embeddings=False,
    )
    model = model_class(config)
    randomise(model, 0.1, seed)
    for each in model.modules():
        if hasattr(each, "e_score_correction_bias"):
            each.e_score_correction_bias = torch.linspace(-0.1, 0.1, len(each.e_score_correction_bias))
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]])
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "processor_class": f"{processors}Processor",
    }
    images = {"size": {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 168 * 168}}
    videos = {"size": {"shortest_edge": 4 * 56 * 56, "longest_edge": 16 * 112 * 112}, "fps": 2, "num_frames": 16}
    image = {**processor, **images, "image_processor_type": f"{processors}ImageProcessor"}
    video = {**processor, **videos, "max_duration": 300, "video_processor_type": f"{processors}VideoProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    return folder


TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 14}
# The tower, the text model, and how features are selected, of each kind of LLaVA.
LLAVA: Mapping[str, Mapping[str, Any]] = {
    "llava": {
        "vision_config": {**TOWER, "model_type": "clip_vision_model", "image_size": 56, "projection_dim": 16},
        "text": {"model_type": "llama"},
    },
    "llava_siglip": {
        "vision_config": {**TOWER, "model_type": "siglip_vision_model", "image_size": 60},
        "text": {
            "model_type": "qwen2",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "vision_feature_layer": [-3, -1],
        "vision_feature_select_strategy": "full",
    },
    "llava_pixtral": {
        "vision_config": {**TOWER, "model_type": "pixtral", "patch_size": 8, "image_size": 96},
        "text": {
            "model_type": "mistral",
            "sliding_window": None,
            "head_dim": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "mistral3": {
        "vision_config": {**TOWER, "model_type": "pixtral", "patch_size": 8, "image_size": 96},
        "text": {
            "model_type": "mistral",
            "sliding_window": None,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "vision_feature_layer": -1,
        "spatial_merge_size": 2,
    },
}
_MISTRAL3 = (Mistral3Config, Mistral3ForConditionalGeneration)
LLAVA_PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "llava": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 56},
        "crop_size": {"height": 56, "width": 56},
        "do_center_crop": True,
        "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
    },
    "llava_siglip": {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": 60, "width": 60},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "llava_pixtral": {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 96},
        "patch_size": {"height": 8, "width": 8},
        "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
    },
    "mistral3": {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 96},
        "patch_size": {"height": 8, "width": 8},
        "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
    },
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAVA_TEXT: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": _LLAMA3,
}


def write_llava(folder: Path, seed: int, name: str = "llava") -> Path:
    """A checkpoint of a kind of LLAVA, with the files of its published ones."""
    tokenizer = make_tokenizer(TINY)
    pixtral = name in ("llava_pixtral", "mistral3")
    classes: tuple[Any, Any] = _MISTRAL3 if name == "mistral3" else (LlavaConfig, LlavaForConditionalGeneration)
    config_class, model_class = classes
    image = "[IMG]" if pixtral else "<image>"
    breaks = ["[IMG_BREAK]", "[IMG_END]"] if pixtral else []
    tokenizer.add_tokens([image, *breaks], special_tokens=True)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|vision_start|><|image_pad|><|vision_end|>", image)
    ids = tokenizer.get_vocab()
    settings = dict(LLAVA[name])
    text = {**LLAVA_TEXT, **settings.pop("text"), "vocab_size": len(tokenizer)}
    config = config_class(text_config=text, image_token_index=ids[image], tie_word_embeddings=False, **settings)
    model = model_class(config)
    randomise(model, 0.1, seed)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]])
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(LLAVA_PROCESSORS[name]))
    return folder


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
    settings = {
        "size": {"height": ONEVISION_PX, "width": ONEVISION_PX},
        "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
    }
    classes = LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text = {"model_type": "qwen2", "rope_parameters": rope}
    return _write_tiled(folder, seed, classes, ONEVISION, text, settings, "LlavaOnevision")


def _write_next_video(folder: Path, seed: int) -> Path:
    settings = {
        "size": {"shortest_edge": NEXT_VIDEO_PX},
        "crop_size": {"height": NEXT_VIDEO_PX, "width": NEXT_VIDEO_PX},
        "do_center_crop": True,
        "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
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
    for kind in ("image", "video"):
        marked = f"<|vision_start|><|{kind}_pad|><|vision_end|>"
        tokenizer.chat_template = tokenizer.chat_template.replace(marked, f"<{kind}>")
    assert len(tokenizer) == NEWLINE_ID
    ids = tokenizer.get_vocab()
    text = {**LLAVA_TEXT, **text, "vocab_size": len(tokenizer)}
    tokens = {f"{kind}_token_index": ids[f"<{kind}>"] for kind in ("image", "video")}
    config_class, model_class = classes
    model = model_class(config_class(text_config=text, tie_word_embeddings=False, **tokens, **own))
    randomise(model, 0.1, seed)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]])
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pinpoints = {"image_grid_pinpoints": own["image_grid_pinpoints"]}
    image = {**settings, **pinpoints, "image_processor_type": f"{name}ImageProcessor"}
    video = {**settings, "video_processor_type": f"{name}VideoProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    return folder


INTERNVL_PX = 56
INTERNVL: dict[str, Any] = {
    "vision_config": {
        **TOWER,
        "model_type": "internvl_vision",
        "image_size": [INTERNVL_PX] * 2,
        "patch_size": [14, 14],
    },
    "image_seq_length": 4,
}


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# The language models of 2.5 and 3, and those of 3.5. A head's size is its own in Qwen3.
INTERNVL_TEXT: Mapping[str, Mapping[str, Any]] = {
    "internvl": {"model_type": "qwen2"},
    "internvl_qwen3": {"model_type": "qwen3", "head_dim": 24},
    "internvl_qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 24,
        "norm_topk_prob": True,
        "moe_intermediate_size": 48,
        **EXPERTS,
    },
}
# Of the large sizes.
_INTERNVIT_6B = {"use_qk_norm": True, "norm_type": "rms_norm"}
# The defaults of transformers' class, which the published 3.5 have: CLIP's mean, and 384 of 448 pixels, here 48 of 56.
INTERNVL_3_5_VIDEO = {
    "size": {"height": 48, "width": 48},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def _write_internvl(folder: Path, seed: int, name: str) -> Path:
    tokenizer = make_tokenizer(TINY)
    tokenizer.add_tokens(["<img>", "</img>", "<IMG_CONTEXT>", "<video>"], special_tokens=True)
    for marked, token in (("image", "<IMG_CONTEXT>"), ("video", "<video>")):
        template = tokenizer.chat_template
        tokenizer.chat_template = template.replace(f"<|vision_start|><|{marked}_pad|><|vision_end|>", token)
    ids = tokenizer.get_vocab()
    text = {**LLAVA_TEXT, **INTERNVL_TEXT[name], "rope_parameters": _ROPE, "vocab_size": len(tokenizer)}
    vision = {**INTERNVL["vision_config"], **(_INTERNVIT_6B if name == "internvl_qwen3" else {})}
    config = InternVLConfig(
        text_config=text,
        image_token_id=ids["<IMG_CONTEXT>"],
        tie_word_embeddings=False,
        **{**INTERNVL, "vision_config": vision},
    )
    model = InternVLForConditionalGeneration(config)
    randomise(model, 0.1, seed)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]])
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = {
        "size": {"height": INTERNVL_PX, "width": INTERNVL_PX},
        "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
    }
    image = {**settings, "max_patches": 6, "image_processor_type": "GotOcr2ImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    own = {} if name == "internvl" else INTERNVL_3_5_VIDEO
    video = {**settings, **own, "video_processor_type": "InternVLVideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    return folder


def _write_video_llama_3(folder: Path, seed: int) -> Path:
    tokenizer = make_tokenizer(TINY)
    ids = tokenizer.get_vocab()
    for kind in ("image", "video"):
        marked = f"<|vision_start|><|{kind}_pad|><|vision_end|>"
        tokenizer.chat_template = tokenizer.chat_template.replace(marked, f"<|{kind}_pad|>")
    text = {**LLAVA_TEXT, "model_type": "qwen2", "rope_parameters": _ROPE, "vocab_size": len(tokenizer)}
    config = VideoLlama3Config(
        text_config=text,
        vision_config=TOWER,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        tie_word_embeddings=False,
    )
    model = VideoLlama3ForConditionalGeneration(config)
    randomise(model, 0.1, seed)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]])
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 14, "temporal_patch_size": 1}
    image = {**settings, "merge_size": 1, "size": {"shortest_edge": 28 * 28, "longest_edge": 84 * 84}}
    video = {**settings, "merge_size": 2, "size": {"shortest_edge": 28 * 28, "longest_edge": 8 * 56 * 56}}
    image["image_processor_type"] = "VideoLlama3ImageProcessor"
    video |= {"video_processor_type": "VideoLlama3VideoProcessor", "use_token_compression": False}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    return folder


def _write_minicpm(folder: Path, seed: int, version: str) -> Path:
    minicpm.write(folder, seed, version)
    return folder


_QWEN3: dict[str, Any] = {
    "patch_px": 16,
    "merge": 2,
    "temporal_patch": 2,
    "hidden": 64,
    "levels": 2,
    "slices_stand_alone": True,
    "text_prefix": "model.language_model.",
}
_QWEN3_5 = {**_QWEN3, "levels": 0}
FAMILIES: Mapping[str, FamilyUnderTest] = {
    **{
        f"minicpmv_{version.replace('.', '_')}": FamilyUnderTest(
            write=partial(_write_minicpm, version=version),
            model=minicpm.TEXT_CLASSES[version][1],
            patch_px=minicpm.PATCH_PX,
            merge=1,
            temporal_patch=1,
            hidden=minicpm.WIDTH,
            levels=0,
            slices_stand_alone=True,
            text_prefix="llm.model.",
            lm_head="llm.lm_head.weight",
            linear=True,
            rows_stand_alone=True,
            model_type="minicpmv",
        )
        for version in ("2.5", "2.6", "4.0", "4.5")
    },
    **{
        name: FamilyUnderTest(
            write=partial(write_minicpmv4_6, model_type=name),
            model=model,
            patch_px=minicpmv4_6.PATCH_PX,
            merge=4,
            temporal_patch=1,
            hidden=QWEN3_5["text"]["hidden_size"],
            levels=0,
            slices_stand_alone=True,
            text_prefix="model.language_model.",
            linear=name == "minicpmv4_6",
            rows_stand_alone=name == "minicpmv4_6",
        )
        for name, (_, model) in minicpmv4_6.CLASSES.items()
    },
    **{
        name: FamilyUnderTest(
            write=partial(write_llava, name=name),
            model=Mistral3ForConditionalGeneration if name == "mistral3" else LlavaForConditionalGeneration,
            patch_px=settings["vision_config"]["patch_size"],
            merge=settings.get("spatial_merge_size", 1),
            temporal_patch=1,
            hidden=64,
            levels=0,
            slices_stand_alone=False,
            text_prefix="language_model.model.",
            lm_head="language_model.lm_head.weight",
            linear=True,
            rows_stand_alone=settings["vision_config"]["model_type"] == "pixtral",
            model_type=name if name == "mistral3" else "llava",
        )
        for name, settings in LLAVA.items()
    },
    **{
        name: FamilyUnderTest(
            write=partial(_write_internvl, name=name),
            model=InternVLForConditionalGeneration,
            patch_px=14,
            merge=2,
            temporal_patch=1,
            hidden=64,
            levels=0,
            slices_stand_alone=True,
            text_prefix="language_model.model.",
            lm_head="language_model.lm_head.weight",
            linear=True,
            model_type="internvl",
        )
        for name in INTERNVL_TEXT
    },
    **{
        name: FamilyUnderTest(
            write=partial(_write_glm, name=name),
            model=model,
            patch_px=14,
            merge=2,
            temporal_patch=2,
            hidden=64,
            levels=0,
            slices_stand_alone=True,
            text_prefix="model.language_model.",
        )
        for name, (_, model, _) in _GLM_CLASSES.items()
    },
    "cosmos3_edge": FamilyUnderTest(
        write=cosmos3_edge.write,
        model=Cosmos3EdgeForConditionalGeneration,
        patch_px=cosmos3_edge.PATCH_PX,
        merge=cosmos3_edge.MERGE,
        temporal_patch=1,
        hidden=cosmos3_edge.HIDDEN,
        levels=0,
        slices_stand_alone=True,
        text_prefix="model.language_model.",
        channels_last=True,
    ),
    "llava_next_video": FamilyUnderTest(
        write=_write_next_video,
        model=LlavaNextVideoForConditionalGeneration,
        patch_px=14,
        merge=1,
        temporal_patch=1,
        hidden=64,
        levels=0,
        slices_stand_alone=False,
        text_prefix="language_model.model.",
        lm_head="language_model.lm_head.weight",
        linear=True,
        rows_stand_alone=True,
        newline_id=NEWLINE_ID,
    ),
    "llava_onevision": FamilyUnderTest(
        write=_write_onevision,
        model=LlavaOnevisionForConditionalGeneration,
        patch_px=14,
        merge=1,
        temporal_patch=1,
        hidden=64,
        levels=0,
        slices_stand_alone=False,
        text_prefix="language_model.model.",
        lm_head="language_model.lm_head.weight",
        linear=True,
        rows_stand_alone=True,
        newline_id=NEWLINE_ID,
    ),
    "qwen2_vl": FamilyUnderTest(
        write=_write_qwen2_vl,
        model=Qwen2VLForConditionalGeneration,
        patch_px=14,
        merge=2,
        temporal_patch=2,
        hidden=64,
        levels=0,
        slices_stand_alone=False,
        text_prefix="model.",
    ),
    "qwen2_5_vl": FamilyUnderTest(
        write=lambda folder, seed: write_checkpoint(folder, TINY, seed),
        model=Qwen2_5_VLForConditionalGeneration,
        patch_px=TINY.patch_px,
        merge=TINY.merge,
        temporal_patch=TINY.temporal_patch,
        hidden=TINY.hidden,
        levels=0,
        slices_stand_alone=False,
        text_prefix="model.",
    ),
    "qwen3_5": FamilyUnderTest(write_qwen3_5, Qwen3_5ForConditionalGeneration, **_QWEN3_5),
    "qwen3_5_moe": FamilyUnderTest(write_qwen3_5_moe, Qwen3_5MoeForConditionalGeneration, **_QWEN3_5),
    "video_llama_3": FamilyUnderTest(
        write=_write_video_llama_3,
        model=VideoLlama3ForConditionalGeneration,
        patch_px=14,
        merge=2,
        temporal_patch=1,
        hidden=64,
        levels=0,
        slices_stand_alone=True,
        text_prefix="model.language_model.",
        linear=True,
    ),
    "qwen3_vl": FamilyUnderTest(_write_qwen3_vl, Qwen3VLForConditionalGeneration, **_QWEN3),
    "qwen3_vl_moe": FamilyUnderTest(write_qwen3_vl_moe, Qwen3VLMoeForConditionalGeneration, **_QWEN3),
}


QWEN = sorted(name for name in FAMILIES if name.startswith("qwen"))


def vision_of(model: Any) -> Any:
    """The vision tower of a whole model of transformers, whose `pooler_output` are tokens."""
    inner = model.model
    return cosmos3_edge.Vision(inner) if model.config.model_type == "cosmos3_edge" else inner.visual


def load_reference(name: str, folder: Path) -> Any:
    """The whole model in transformers, in float32 with plain attention; of MiniCPM-V the language model."""
    if FAMILIES[name].model_type == "minicpmv":
        return minicpm.read_text(folder)
    model: Any = FAMILIES[name].model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()
