"""Writes complete Qwen2.5-VL checkpoint folders of any size, with random weights from a seed.

It owns the demo model's shape, tokenizer, chat template and processor settings; `demo.train` trains the weights. The
files are those of Qwen/Qwen2.5-VL-7B-Instruct with smaller sizes.
Source: that checkpoint's config.json, preprocessor_config.json and chat template; Qwen2.5-VL, arXiv 2502.13923.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from demo.wordings import sentences

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)
SAMPLE_FPS = 2
TOKENS_PER_SECOND = 2

# Qwen2.5-VL's template without its default system turn.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'video' or 'video' in part -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}
{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a checkpoint. `mrope_section` sums to half the head size; `window_px` is a multiple of patch · merge."""

    merges: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    mrope_section: tuple[int, int, int]
    rope_theta: float
    tie_word_embeddings: bool
    tower_hidden: int
    tower_depth: int
    tower_heads: int
    tower_intermediate: int
    window_px: int
    full_attention_blocks: tuple[int, ...]
    min_pixels: int
    max_pixels: int
    init_range: float
    context_tokens: int = 32768
    patch_px: int = 14
    merge: int = 2
    temporal_patch: int = 2


# The temporal rotations span wavelengths from three slices to twice the clip, so that the model can tell early from
# late. Those of height and width hardly turn over a prompt, so that queries can match colours and shapes at any place.
DEMO = Shape(
    merges=320,
    hidden=192,
    layers=4,
    heads=6,
    kv_heads=2,
    intermediate=384,
    mrope_section=(6, 5, 5),
    rope_theta=1000.0,
    tie_word_embeddings=True,
    tower_hidden=96,
    tower_depth=4,
    tower_heads=3,
    tower_intermediate=256,
    window_px=56,
    full_attention_blocks=(1, 3),
    min_pixels=56 * 56,
    # Above the training size of 112 × 112: at exactly that limit, rounding resizes a 128 × 128 clip to 84 × 84.
    max_pixels=120 * 120,
    init_range=0.04,
)
TINY = Shape(
    merges=64,
    hidden=64,
    layers=3,
    heads=4,
    kv_heads=2,
    intermediate=96,
    mrope_section=(2, 3, 3),
    rope_theta=10000.0,
    tie_word_embeddings=False,
    tower_hidden=32,
    tower_depth=3,
    tower_heads=2,
    tower_intermediate=48,
    window_px=56,
    full_attention_blocks=(1,),
    min_pixels=56 * 56,
    max_pixels=168 * 168,
    init_range=0.1,
)


def write_checkpoint(folder: Path, shape: Shape = DEMO, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint with random weights to `folder` (created if missing) and return `folder`."""
    tokenizer = make_tokenizer(shape)
    model = Qwen2_5_VLForConditionalGeneration(make_config(shape, tokenizer))
    randomise(model, shape.init_range, seed)
    model.to(dtype=dtype)
    save_checkpoint(folder, model, tokenizer, shape)
    return folder


def save_checkpoint(
    folder: Path, model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, shape: Shape
) -> None:
    """Write all files of a checkpoint folder: weights, configs, tokenizer, chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = _generation_config(tokenizer)
    model.save_pretrained(folder)
    # transformers writes weights with mode 600; the containers' user must be able to read them.
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    _write_json(folder / "preprocessor_config.json", _image_processor(shape))
    _write_json(folder / "video_preprocessor_config.json", _video_processor(shape))


@torch.no_grad()
def randomise(model: torch.nn.Module, init_range: float, seed: int) -> None:
    """Set every parameter from `seed`: weights of norms near 1, others near 0, none exactly 1 or 0.

    The values are the same on every CPU. On another device they are drawn by its own generator.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        centre = 1.0 if "norm" in name or "ln_q" in name else 0.0
        parameter.copy_(centre + init_range * torch.randn(parameter.shape, generator=generator, device=device))


def make_tokenizer(shape: Shape, more: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Qwen2's byte-level BPE with merges learnt from the demo's sentences and `more`, plus the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + shape.merges, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*sentences(), *more], trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=shape.context_tokens,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_config(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    ids = {token: _id(tokenizer, token) for token in SPECIAL_TOKENS}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.context_tokens,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "mrope_section": list(shape.mrope_section),
        },
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "tie_word_embeddings": shape.tie_word_embeddings,
    }
    vision = {
        "depth": shape.tower_depth,
        "hidden_size": shape.tower_hidden,
        "intermediate_size": shape.tower_intermediate,
        "num_heads": shape.tower_heads,
        "patch_size": shape.patch_px,
        "spatial_merge_size": shape.merge,
        "temporal_patch_size": shape.temporal_patch,
        "tokens_per_second": TOKENS_PER_SECOND,
        "window_size": shape.window_px,
        "out_hidden_size": shape.hidden,
        "fullatt_block_indexes": list(shape.full_attention_blocks),
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=shape.tie_word_embeddings,
    )


def _generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    end_of_text, end_of_turn = _id(tokenizer, "<|endoftext|>"), _id(tokenizer, "<|im_end|>")
    return GenerationConfig(
        do_sample=False, bos_token_id=end_of_text, eos_token_id=[end_of_turn, end_of_text], pad_token_id=end_of_text
    )


def _id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    return int(tokenizer.get_vocab()[token])


def _processor(shape: Shape) -> dict[str, Any]:
    return {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(IMAGE_MEAN),
        "image_std": list(IMAGE_STD),
        "merge_size": shape.merge,
        "patch_size": shape.patch_px,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": shape.max_pixels, "shortest_edge": shape.min_pixels},
        "temporal_patch_size": shape.temporal_patch,
    }


def _image_processor(shape: Shape) -> dict[str, Any]:
    return _processor(shape) | {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
    }


def _video_processor(shape: Shape) -> dict[str, Any]:
    return _processor(shape) | {
        "cap_pixels_per_frame": False,
        "do_sample_frames": True,
        "fps": SAMPLE_FPS,
        "max_frames": 768,
        "min_frames": 4,
        "processor_class": "Qwen2_5_VLProcessor",
        "video_processor_type": "Qwen2VLVideoProcessor",
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
