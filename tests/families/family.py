"""What tests know of a model family, and how its tiny random checkpoints are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast

from demo.checkpoint import randomise
from gridsieve.common.contract.plan import PromptPlan
from tests.recurrent import as_trained

# Of most text models, in transformers' names.
TEXT: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
# Of most towers that are not of one model alone, and how their processors normalise.
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 14}
NORMALISED = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}


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
    side: rows and columns of the tokens of every frame, where all have one size; 0: any.
    stored: the vectors of `model` that prompts name, by their ids, which follow the vocabulary.
    channels_last: a patch's values are in the order y, x, channel.
    model_type: of its config.json, where that is not its name in FAMILIES.
    hears: it takes sounds, too.
    inputs: what the processor gives `model` for a plan and the frames of its items, by the checkpoint's folder and its
        config; None: `tests/integration/reference.py` knows.
    """

    write: Callable[[Path, int], Path]
    model: Any
    patch_px: int = 14
    merge: int = 2
    temporal_patch: int = 1
    hidden: int = TEXT["hidden_size"]
    levels: int = 0
    slices_stand_alone: bool = False
    text_prefix: str = "model.language_model."
    linear: bool = False
    rows_stand_alone: bool = False
    side: int = 0
    stored: Mapping[int, Callable[[Any], Tensor]] = field(default_factory=dict)
    channels_last: bool = False
    model_type: str = ""
    lm_head: str = "lm_head.weight"
    hears: bool = False
    inputs: Callable[[PromptPlan, Mapping[int, bytearray], Path, Any], dict[str, Tensor]] | None = None

    @property
    def token_px(self) -> int:
        return self.patch_px * self.merge

    def sized(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns of the tokens of a frame: these, if the family takes them."""
        return (self.side, self.side) if self.side else (rows, columns)


# Fields of a family whose checkpoints have the text model's names before those of the whole.
TEXT_FIRST: Mapping[str, Any] = {
    "text_prefix": "language_model.model.",
    "lm_head": "language_model.lm_head.weight",
    "linear": True,
}


def mark_media(tokenizer: PreTrainedTokenizerFast, **marks: str) -> None:
    """Replaces what stands for an `image` and a `video` in the chat template."""
    for kind, mark in marks.items():
        placeholder = f"<|vision_start|><|{kind}_pad|><|vision_end|>"
        tokenizer.chat_template = tokenizer.chat_template.replace(placeholder, mark)


def save(
    folder: Path,
    seed: int,
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    image: Mapping[str, Any],
    video: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint with random weights. image, video: settings of the processors."""
    randomise(model, 0.1, seed)
    if any("linear_attn" in name for name, _ in model.named_parameters()):
        as_trained(model)
    ids = tokenizer.get_vocab()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]])
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, settings in (("preprocessor_config.json", image), ("video_preprocessor_config.json", video)):
        if settings:
            (folder / name).write_text(json.dumps(settings))
    return folder
