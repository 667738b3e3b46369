"""SmolVLM2's family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

from demo.checkpoint import TINY, make_tokenizer
from gridsieve.common.contract.plan import PromptPlan
from tests.families.family import ROPE, TEXT, TOWER, FamilyUnderTest, save

# Two pixels of a square are left over, as of the published 384 with patches of 14.
SIDE_PX, PATCH_PX, MERGE, TOKENS = 56, 9, 3, 4
# Of the published checkpoints, which place no videos.
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]['type'] == "
    "'image' %}{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
MARKS = (
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
    "<image>",
    "<end_of_utterance>",
)
PROCESSOR: Mapping[str, Any] = {
    "image_processor_type": "SmolVLMImageProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 1,
    "size": {"longest_edge": 3 * SIDE_PX},
    "max_image_size": {"longest_edge": SIDE_PX},
    "video_sampling": {"fps": 1, "max_frames": 8, "video_size": {"longest_edge": SIDE_PX}},
}


def _write(folder: Path, seed: int) -> Path:
    tokenizer = make_tokenizer(TINY)
    tokenizer.add_tokens(list(MARKS), special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    config = SmolVLMConfig(
        text_config={**TEXT, "model_type": "llama", "rope_parameters": ROPE, "vocab_size": len(tokenizer)},
        vision_config={**TOWER, "image_size": SIDE_PX, "patch_size": PATCH_PX},
        scale_factor=MERGE,
        image_token_id=tokenizer.get_vocab()["<image>"],
        tie_word_embeddings=False,
    )
    save(folder, seed, SmolVLMForConditionalGeneration(config), tokenizer, PROCESSOR)
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": TOKENS}))
    return folder


def _inputs(plan: PromptPlan, frames: Mapping[int, bytearray], folder: Path, config: Any) -> dict[str, Tensor]:
    pixels = []
    for index, item in enumerate(plan.media):
        levels = np.frombuffer(frames[index], np.uint8).reshape(item.frames.count, SIDE_PX, SIDE_PX, 3)
        # The whole picture is sent before its squares, and stands after them in the prompt.
        shown = np.roll(levels, -1, axis=0) if item.frames.tile_columns else levels
        pixels.append((torch.from_numpy(shown.copy()).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5)
    ids = torch.from_numpy(plan.input_ids.astype(np.int64))[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.cat(pixels)[None]}


FAMILIES = {
    "smolvlm": FamilyUnderTest(
        _write,
        SmolVLMForConditionalGeneration,
        patch_px=PATCH_PX,
        merge=MERGE,
        slices_stand_alone=True,
        text_prefix="model.text_model.",
        linear=True,
        rows_stand_alone=True,
        side=2,
        inputs=_inputs,
    )
}
