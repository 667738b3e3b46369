"""Ovis2's family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Ovis2Config, Ovis2ForConditionalGeneration

from demo.checkpoint import TINY, make_tokenizer
from gridsieve.common.contract.plan import PromptPlan
from tests.families.family import NORMALISED, ROPE, TEXT, TOWER, FamilyUnderTest, mark_media, save

SIDE_PX, MERGE, TOKENS = 56, 2, 4
# In the order of the vectors that stand for them.
INDICATORS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
PAD = "<IMG_ATOM>"
FIRST_ID = 334  # after the vocabulary
PROCESSOR: Mapping[str, Any] = {
    **NORMALISED,
    "image_processor_type": "Ovis2ImageProcessor",
    "size": {"height": SIDE_PX, "width": SIDE_PX},
    "crop_to_patches": True,
    "max_patches": 6,
}


def _write(folder: Path, seed: int) -> Path:
    tokenizer = make_tokenizer(TINY)
    tokenizer.add_tokens([PAD, *INDICATORS], special_tokens=True)
    mark_media(tokenizer, image="<image>")
    assert len(tokenizer) == FIRST_ID
    ids = tokenizer.get_vocab()
    config = Ovis2Config(
        text_config={**TEXT, "model_type": "qwen2", "rope_parameters": ROPE, "vocab_size": len(tokenizer)},
        vision_config={**TOWER, "image_size": SIDE_PX, "hidden_stride": MERGE, "vocab_size": 40},
        hidden_size=TEXT["hidden_size"],
        vocab_size=len(tokenizer),
        image_token_id=ids[PAD],
        visual_indicator_token_ids=[ids[name] for name in INDICATORS],
        tie_word_embeddings=False,
    )
    save(folder, seed, Ovis2ForConditionalGeneration(config), tokenizer, PROCESSOR)
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": TOKENS}))
    return folder


def _vector(whole: Any, number: int) -> Tensor:
    vector: Tensor = whole.model.visual_embeddings_table.weight[number - len(INDICATORS)]
    return vector


def _inputs(plan: PromptPlan, frames: Mapping[int, bytearray], folder: Path, config: Any) -> dict[str, Tensor]:
    mean, std = (torch.tensor(NORMALISED[name])[:, None, None] for name in ("image_mean", "image_std"))
    levels = np.frombuffer(b"".join(frames[index] for index in range(len(plan.media))), np.uint8)
    pictures = torch.from_numpy(levels.reshape(-1, SIDE_PX, SIDE_PX, 3).copy()).permute(0, 3, 1, 2)
    theirs = dict(enumerate(config.visual_indicator_token_ids, FIRST_ID))
    ids = torch.tensor([[theirs.get(each, each) for each in plan.input_ids.tolist()]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": (pictures / 255 - mean) / std}


FAMILIES = {
    "ovis2": FamilyUnderTest(
        _write,
        Ovis2ForConditionalGeneration,
        merge=MERGE,
        linear=True,
        rows_stand_alone=True,
        side=2,
        stored={FIRST_ID + number: partial(_vector, number=number) for number in range(len(INDICATORS))},
        inputs=_inputs,
    )
}
