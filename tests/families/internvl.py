"""InternVL's families, and VideoLLaMA 3."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import (
    InternVLConfig,
    InternVLForConditionalGeneration,
    VideoLlama3Config,
    VideoLlama3ForConditionalGeneration,
)

from demo.checkpoint import TINY, make_tokenizer
from tests.families.family import NORMALISED, ROPE, TEXT, TEXT_FIRST, TOWER, FamilyUnderTest, mark_media, save
from tests.families.qwen import EXPERTS

INTERNVL_PX = 56
_VISION = {**TOWER, "model_type": "internvl_vision", "image_size": [INTERNVL_PX] * 2, "patch_size": [14, 14]}
_QWEN3 = {"model_type": "qwen3", "head_dim": 24}
# The language models of 2.5 and 3, and those of 3.5. A head's size is its own in Qwen3.
INTERNVL_TEXT: Mapping[str, Mapping[str, Any]] = {
    "internvl": {"model_type": "qwen2"},
    "internvl_qwen3": _QWEN3,
    "internvl_qwen3_moe": {
        **_QWEN3,
        **EXPERTS,
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "moe_intermediate_size": 48,
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
    mark_media(tokenizer, image="<IMG_CONTEXT>", video="<video>")
    config = InternVLConfig(
        vision_config={**_VISION, **(_INTERNVIT_6B if name == "internvl_qwen3" else {})},
        text_config={**TEXT, **INTERNVL_TEXT[name], "rope_parameters": ROPE, "vocab_size": len(tokenizer)},
        image_seq_length=4,
        image_token_id=tokenizer.get_vocab()["<IMG_CONTEXT>"],
        tie_word_embeddings=False,
    )
    settings = {**NORMALISED, "size": {"height": INTERNVL_PX, "width": INTERNVL_PX}}
    image = {**settings, "max_patches": 6, "image_processor_type": "GotOcr2ImageProcessor"}
    own = {} if name == "internvl" else INTERNVL_3_5_VIDEO
    video = {**settings, **own, "video_processor_type": "InternVLVideoProcessor"}
    return save(folder, seed, InternVLForConditionalGeneration(config), tokenizer, image, video)


def _write_video_llama_3(folder: Path, seed: int) -> Path:
    tokenizer = make_tokenizer(TINY)
    ids = tokenizer.get_vocab()
    mark_media(tokenizer, image="<|image_pad|>", video="<|video_pad|>")
    config = VideoLlama3Config(
        text_config={**TEXT, "model_type": "qwen2", "rope_parameters": ROPE, "vocab_size": len(tokenizer)},
        vision_config=TOWER,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        tie_word_embeddings=False,
    )
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 14, "temporal_patch_size": 1}
    image = {**settings, "merge_size": 1, "size": {"shortest_edge": 28 * 28, "longest_edge": 84 * 84}}
    video = {**settings, "merge_size": 2, "size": {"shortest_edge": 28 * 28, "longest_edge": 8 * 56 * 56}}
    image["image_processor_type"] = "VideoLlama3ImageProcessor"
    video |= {"video_processor_type": "VideoLlama3VideoProcessor", "use_token_compression": False}
    return save(folder, seed, VideoLlama3ForConditionalGeneration(config), tokenizer, image, video)


FAMILIES = {
    **{
        name: FamilyUnderTest(
            partial(_write_internvl, name=name),
            InternVLForConditionalGeneration,
            slices_stand_alone=True,
            side=2,
            model_type="internvl",
            **TEXT_FIRST,
        )
        for name in INTERNVL_TEXT
    },
    "video_llama_3": FamilyUnderTest(
        _write_video_llama_3, VideoLlama3ForConditionalGeneration, slices_stand_alone=True, linear=True
    ),
}
