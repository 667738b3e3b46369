"""Nemotron H Omni: tiny checkpoints, made by transformers' own class."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, NemotronH_Omni_Reasoning_V3, NemotronH_Omni_Reasoning_V3_Config

from demo.checkpoint import TINY, make_tokenizer, randomise

MODEL: Any = NemotronH_Omni_Reasoning_V3
PATCH_PX, MERGE, TUBELET, HIDDEN = 16, 2, 2, 64
# There is no <video>: the chat template writes it as text.
TOKENS = ("<image>", "<img>", "</img>", "<so_embedding>", "<so_start>", "<so_end>")
# One group of experts of two, chosen first; time steps that the scan raises to `time_step_min`.
TEXT: Mapping[str, Any] = {
    "hidden_size": HIDDEN,
    "layers_block_type": [
        "linear_attention",
        "mlp",
        "linear_attention",
        "full_attention",
        "moe",
        "linear_attention",
        "full_attention",
        "mlp",
    ],
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32768,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 16,
    "time_step_min": 0.01,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 32,
}
VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "mlp_ratio": 2.0,
    "patch_size": PATCH_PX,
    "image_size": 4 * PATCH_PX,
    "max_img_size": 8 * PATCH_PX,
    "num_cls_tokens": 3,
    "num_registers": 7,
    "video_temporal_patch_size": TUBELET,
}
# Both processors read this file.
SETTINGS: Mapping[str, Any] = {
    "image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor",
    "video_processor_type": "NemotronH_Omni_Reasoning_V3VideoProcessor",
    "processor_class": "NemotronH_Omni_Reasoning_V3Processor",
    "norm_mean": [0.48145466, 0.4578275, 0.40821073],
    "norm_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": PATCH_PX,
    "downsample_ratio": 1 / MERGE,
    "min_num_patches": 16,
    "max_num_patches": 100,
    "max_model_len": 32768,
    "video_target_num_patches": 36,
    "video_maintain_aspect_ratio": True,
}


def write(
    folder: Path, seed: int, text: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None
) -> Any:
    """Writes a checkpoint with random float32 weights, and returns its model.

    text: what differs of its text config; with num_nextn_predict_layers 1 a norm follows the tower.
    config: what differs of its config, as video_pruning_rate.
    """
    tokenizer = make_tokenizer(TINY)
    tokenizer.add_tokens(list(TOKENS), special_tokens=True)
    for kind in ("image", "video"):
        marked = f"<|vision_start|><|{kind}_pad|><|vision_end|>"
        tokenizer.chat_template = tokenizer.chat_template.replace(marked, f"<{kind}>")
    ids = tokenizer.get_vocab()
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    fields: dict[str, Any] = {
        "text_config": {**TEXT, "vocab_size": len(tokenizer), "eos_token_id": ends[0], **(text or {})},
        "vision_config": dict(VISION),
        "audio_config": None,
        "vision_hidden_size": VISION["hidden_size"],
        "projector_hidden_size": 80,
        "video_temporal_patch_size": TUBELET,
        "image_token_id": ids["<image>"],
        "audio_token_id": ids["<so_embedding>"],
        "tie_word_embeddings": False,
    }
    model = MODEL(NemotronH_Omni_Reasoning_V3_Config(**fields | dict(config or {})))
    randomise(model, 0.1, seed)
    _as_trained(model)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=ends)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    published = {name: each for name, each in load_file(path).items() if "layer_scale" not in name}
    save_file(published, path, {"format": "pt"})
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return model.eval()


@torch.no_grad()
def _as_trained(model: Any) -> None:
    """Gives the heads of Mamba layers decays from one token to hundreds. The layers of the tower have no scales, as in
    published files.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.copy_(torch.linspace(-3.0, 1.5, len(parameter)))
        if name.endswith("dt_bias"):
            parameter.copy_(torch.linspace(-6.0, 0.0, len(parameter)))
        if name.endswith(".D"):
            parameter += 1.0
        if name.endswith("lambda1"):
            parameter.fill_(1.0)
    for each in model.modules():
        if hasattr(each, "e_score_correction_bias"):
            each.e_score_correction_bias.copy_(torch.linspace(-0.1, 0.1, len(each.e_score_correction_bias)))
