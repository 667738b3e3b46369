"""GLM's families."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm46VConfig,
    Glm46VForConditionalGeneration,
)

from demo.checkpoint import TINY, make_tokenizer
from tests.families.family import ROPE, TEXT, FamilyUnderTest, mark_media, save

# Half of each head is rotated.
GLM_TEXT: Mapping[str, Any] = {
    **TEXT,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]},
}
GLM_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 14,
    "image_size": 70,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
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
_CLASSES: Mapping[str, tuple[Any, Any, str]] = {
    "glm4v": (Glm4vConfig, Glm4vForConditionalGeneration, "Glm4v"),
    "glm46v": (Glm46VConfig, Glm46VForConditionalGeneration, "Glm46V"),
    "glm4v_moe": (Glm4vMoeConfig, Glm4vMoeForConditionalGeneration, "Glm4v"),
}
GLM_TOKENS = {each: [f"<|begin_of_{each}|>", f"<|{each}|>", f"<|end_of_{each}|>"] for each in ("image", "video")}
_PROCESSOR = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}


def _write(folder: Path, seed: int, name: str) -> Path:
    """With the names and processors of published checkpoints, whose template begins with two control tokens."""
    tokenizer, (config_class, model_class, processors) = make_tokenizer(TINY), _CLASSES[name]
    tokenizer.add_tokens(["[gMASK]", "<sop>", *GLM_TOKENS["image"], *GLM_TOKENS["video"]], special_tokens=True)
    mark_media(tokenizer, **{kind: "".join(tokens) for kind, tokens in GLM_TOKENS.items()})
    tokenizer.chat_template = f"[gMASK]<sop>{tokenizer.chat_template}"
    ids = tokenizer.get_vocab()
    experts = GLM_EXPERTS if name == "glm4v_moe" else {}
    config = config_class(
        text_config={**GLM_TEXT, **experts, "vocab_size": len(tokenizer)},
        vision_config=GLM_VISION,
        **{f"{kind}_token_id": ids[f"<|{kind}|>"] for kind in GLM_TOKENS},
        **{f"{kind}_start_token_id": ids[f"<|begin_of_{kind}|>"] for kind in GLM_TOKENS},
        **{f"{kind}_end_token_id": ids[f"<|end_of_{kind}|>"] for kind in GLM_TOKENS},
        tie_word_embeddings=False,
    )
    model = model_class(config)
    for each in model.modules():
        if hasattr(each, "e_score_correction_bias"):
            each.e_score_correction_bias = torch.linspace(-0.1, 0.1, len(each.e_score_correction_bias))
    processor = {**_PROCESSOR, "processor_class": f"{processors}Processor"}
    images = {"size": {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 168 * 168}}
    videos = {"size": {"shortest_edge": 4 * 56 * 56, "longest_edge": 16 * 112 * 112}, "fps": 2, "num_frames": 16}
    image = {**processor, **images, "image_processor_type": f"{processors}ImageProcessor"}
    video = {**processor, **videos, "max_duration": 300, "video_processor_type": f"{processors}VideoProcessor"}
    return save(folder, seed, model, tokenizer, image, video)


FAMILIES = {
    name: FamilyUnderTest(partial(_write, name=name), model, temporal_patch=2, slices_stand_alone=True)
    for name, (_, model, _) in _CLASSES.items()
}
