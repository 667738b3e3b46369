"""MiniCPM-V 4.6 and 4.7: tiny checkpoints, and transformers' processor, tower and positions to compare with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_7Config,
    MiniCPMV4_7ForConditionalGeneration,
)
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor
from transformers.models.minicpmv4_7.processing_minicpmv4_7 import MiniCPMV4_7Processor

from demo.checkpoint import TINY, make_tokenizer, randomise
from tests.families.family import FamilyUnderTest
from tests.families.qwen import QWEN3_5
from tests.recurrent import as_trained

PATCH_PX, SCALE_PX, CELLS = 14, 112, 5
CLASSES: Mapping[str, tuple[Any, Any]] = {
    "minicpmv4_6": (MiniCPMV4_6Config, MiniCPMV4_6ForConditionalGeneration),
    "minicpmv4_7": (MiniCPMV4_7Config, MiniCPMV4_7ForConditionalGeneration),
}
PROCESSORS: Mapping[str, Any] = {"minicpmv4_6": MiniCPMV4_6Processor, "minicpmv4_7": MiniCPMV4_7Processor}
# Their methods that compute sizes need no instance.
IMAGE_PROCESSOR: Any = MiniCPMV4_6ImageProcessorPil
VIDEO_PROCESSOR: Any = MiniCPMV4_6VideoProcessor
# Of the tokenizer, by their names in transformers.
NAMES = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": CELLS * PATCH_PX,
    "patch_size": PATCH_PX,
}
MERGED_AFTER = 1
SETTINGS: Mapping[str, Any] = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": PATCH_PX,
    "scale_resolution": SCALE_PX,
    "max_slice_nums": 9,
    "slice_mode": True,
    "use_image_id": True,
}


def write(folder: Path, seed: int, text: Mapping[str, Any], model_type: str = "minicpmv4_6", mode: str = "16x") -> Any:
    """Writes a checkpoint with random float32 weights, and returns its model. text: the text config, of qwen3_5_text.

    mode: downsample_mode.
    """
    tokenizer = make_tokenizer(TINY)
    tokenizer.add_tokens(list(NAMES.values()), special_tokens=True)
    for kind in ("image", "video"):
        marked, placed = f"<|vision_start|><|{kind}_pad|><|vision_end|>", f"<|{kind}_pad|>"
        tokenizer.chat_template = tokenizer.chat_template.replace(marked, placed)
    ids = tokenizer.get_vocab()
    fields: dict[str, Any] = {
        "text_config": {**text, "model_type": "qwen3_5_text", "vocab_size": len(tokenizer)},
        "vision_config": dict(VISION),
        "insert_layer_id": MERGED_AFTER,
        "downsample_mode": mode,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "tie_word_embeddings": False,
    }
    if model_type == "minicpmv4_7":
        pairs = ("image_start", "image_end", "slice_start", "slice_end")
        fields |= {f"{name}_id": ids[NAMES[f"{name}_token"]] for name in pairs}
        fields["newline_id"] = tokenizer("\n")["input_ids"][0]
    config_class, model_class = CLASSES[model_type]
    model = model_class(config_class(**fields))
    randomise(model, 0.1, seed)
    as_trained(model)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]])
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | NAMES))
    settings = {**SETTINGS, "downsample_mode": mode}
    for file, own in (
        ("preprocessor_config.json", {"image_processor_type": "MiniCPMV4_6ImageProcessor"}),
        (
            "video_preprocessor_config.json",
            {"video_processor_type": "MiniCPMV4_6VideoProcessor", "max_num_frames": 12, "stack_frames": 1},
        ),
    ):
        (folder / file).write_text(json.dumps({**settings, **own}))
    return model.eval()


def processor(folder: Path, model_type: str) -> Any:
    """transformers' processor of a model type with a checkpoint's settings, without torchvision, which it asks for.

    Of videos, float (frames, 3, height, width), it makes no pixels. Frames are not sliced, as the README asks.
    """
    made = object.__new__(PROCESSORS[model_type])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    made.tokenizer, made.chat_template = tokenizer, None
    made.image_processor = IMAGE_PROCESSOR.from_pretrained(folder)
    made.video_processor = _Videos(made.image_processor.downsample_mode)
    made.slice_mode, made.video_slice_mode, made.default_use_image_id = True, True, True
    for name in NAMES:
        setattr(made, name, getattr(tokenizer, name))
    made.image_token_id, made.video_token_id = tokenizer.image_token_id, tokenizer.video_token_id
    return made


@dataclass(frozen=True)
class _Videos:
    """The sizes of frames, as transformers' video processor computes them."""

    downsample_mode: str

    def __call__(self, videos: Sequence[Any], **_: Any) -> dict[str, Any]:
        sizes = [frame.shape[-2:] for video in videos for frame in video]
        sides = [video_size(height, width, self.downsample_mode) for height, width in sizes]
        return {
            "target_sizes_videos": np.array(sides) // PATCH_PX,
            "num_frames_per_video": [len(video) for video in videos],
            "grids_videos": np.zeros((len(sides), 2), int),
        }


def video_size(height: int, width: int, mode: str) -> tuple[int, int]:
    """Height and width of the frames of a video, without slices."""
    size: tuple[int, int] = VIDEO_PROCESSOR.find_best_resize(
        None, (height, width), SCALE_PX, PATCH_PX, allow_upscale=True, downsample_mode=mode
    )
    return size


def video_indices(total: int, rate: float, most: int) -> list[int]:
    """The frames that transformers' video processor samples of a video, at most so many."""
    metadata = SimpleNamespace(total_num_frames=total, fps=rate, duration=total / rate)
    settings: Any = SimpleNamespace(max_num_frames=most, stack_frames=1)
    indices: list[int] = VIDEO_PROCESSOR.sample_frames(settings, metadata)
    return [int(index) for index in indices]


def rgb(data: bytes) -> NDArray[np.uint8]:
    """The pixels of a picture."""
    return np.array(Image.open(BytesIO(data)).convert("RGB"))


def packed(pictures: Sequence[Tensor]) -> Tensor:
    """Pictures, uint8 (H, W, 3), as the tower takes them: (1, 3, patch, patches · patch)."""
    normalised = [(each.permute(2, 0, 1) / 255 - 0.5) / 0.5 for each in pictures]
    cut = [IMAGE_PROCESSOR.reshape_by_patch(None, each.numpy(), PATCH_PX) for each in normalised]
    return torch.from_numpy(np.concatenate(cut, axis=-1))[None]


def features(model: Any, pictures: Sequence[Tensor]) -> list[Tensor]:
    """Tokens (n, D) of each of some pictures, uint8 (H, W, 3), which transformers' tower computes together."""
    sides = torch.tensor([[each.shape[0] // PATCH_PX, each.shape[1] // PATCH_PX] for each in pictures])
    with torch.no_grad():
        found: list[Tensor] = model.model.get_image_features(packed(pictures), sides).pooler_output
    return found


@torch.no_grad()
def kept_features(model: Any, picture: Tensor, kept: Sequence[int], side: int) -> Tensor:
    """Some tokens (k, D) of a picture, uint8 (H, W, 3), which see each other alone: transformers' tower over a picture
    of these side by side, whose patches have the places that they have in the whole.

    side: patches per side of a token.
    """
    vision, (rows, columns) = model.model.vision_tower, (length // PATCH_PX for length in picture.shape[:2])
    placed = vision.embeddings(packed([picture]), target_sizes=torch.tensor([[rows, columns]]))
    corners = [divmod(token, columns // side) for token in kept]
    inner = range(side)
    chosen = [(side * row + y) * columns + side * column + x for y in inner for row, column in corners for x in inner]
    with patch.object(vision.embeddings, "forward", return_value=placed[:, chosen]):
        sides = torch.tensor([[side, side * len(kept)]])
        (found,) = model.model.get_image_features(packed([picture]), sides).pooler_output
    return found


def write_tiny(folder: Path, seed: int, model_type: str = "minicpmv4_6", mode: str = "16x") -> Path:
    """mode: downsample_mode of tower and processors."""
    write(folder, seed, QWEN3_5["text"], model_type, mode)
    return folder


FAMILIES: Mapping[str, FamilyUnderTest] = {
    name: FamilyUnderTest(
        partial(write_tiny, model_type=name),
        model,
        patch_px=PATCH_PX,
        merge=4,
        slices_stand_alone=True,
        linear=name == "minicpmv4_6",
        rows_stand_alone=name == "minicpmv4_6",
    )
    for name, (_, model) in CLASSES.items()
}
