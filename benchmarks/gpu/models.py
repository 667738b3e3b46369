"""The models of the GPU benchmark, in published layouts, with random weights drawn on the device."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from demo.checkpoint import TINY, Shape, make_config, make_tokenizer, randomise, save_checkpoint
from framesieve.common.contract.plan import Grid
from framesieve.services.generation.loading.text_model import assemble, make_text
from framesieve.services.generation.loading.weights import fill
from framesieve.services.generation.model.language_model import LanguageModel


@dataclass(frozen=True, slots=True)
class DeepStack:
    """What Qwen3-VL's layout has beside a `Shape`. place_count: rows of the tower's table of places."""

    indexes: tuple[int, ...]
    place_count: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Target:
    """A model and the sizes to measure it with.

    vocabulary: None: the tokenizer's. deepstack: None: the layout is Qwen2.5-VL's, otherwise Qwen3-VL's.
    law: the layout that is compared with float32 on the CPU, over prompts of so many tokens of text and with videos at
        so many pruning rates, in chunks.
    grids: videos for the tower. budgets: tokens of the largest forwards that graphs are captured for.
    prompts: numbers of tokens to prefill, in each of `chunks`. contexts: of decode steps of each of `sequences`.
    requests_per_s: arrivals, for arrivals_s seconds each.
    clients: of the whole stack, which ask about clips of clip_s seconds.
    side: of the square matrices whose product measures peak arithmetic.
    blocks: of the engine's KV cache on the CPU; on CUDA it fills the memory.
    """

    shape: Shape
    vocabulary: int | None
    deepstack: DeepStack | None
    law: Shape
    law_prompts: tuple[int, ...]
    law_rates: tuple[float, ...]
    law_chunk: int
    grids: tuple[Grid, ...]
    budgets: tuple[int, ...]
    prompts: tuple[int, ...]
    chunks: tuple[int, ...]
    sequences: tuple[int, ...]
    contexts: tuple[int, ...]
    requests_per_s: tuple[float, ...]
    arrivals_s: float
    clients: tuple[int, ...]
    clip_s: int
    side: int
    copied_bytes: int
    blocks: int


# Sizes of Qwen/Qwen2.5-VL-7B-Instruct, from its config.json.
_QWEN2_5_VL_7B_SHAPE = Shape(
    merges=320,
    hidden=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    intermediate=18944,
    mrope_section=(16, 24, 24),
    rope_theta=1e6,
    tie_word_embeddings=False,
    tower_hidden=1280,
    tower_depth=32,
    tower_heads=16,
    tower_intermediate=3420,
    window_px=112,
    full_attention_blocks=(7, 15, 23, 31),
    min_pixels=56 * 56,
    max_pixels=448 * 448,
    init_range=0.02,
    context_tokens=128_000,
)
_QWEN2_5_VL_7B = Target(
    _QWEN2_5_VL_7B_SHAPE,
    vocabulary=152_064,
    deepstack=None,
    # Its layers with a smaller product inside, which the CPU computes in float32.
    law=replace(_QWEN2_5_VL_7B_SHAPE, layers=2, intermediate=4096, tower_depth=2, full_attention_blocks=(1,)),
    law_prompts=(1, 5, 16, 17, 100, 255, 256, 600),
    law_rates=(0.0, 0.75),
    law_chunk=256,
    grids=(Grid(16, 24, 30), Grid(8, 8, 8), Grid(6, 9, 11)),
    budgets=(2048, 16384),
    prompts=(2048, 4096, 8192, 16384, 32768),
    chunks=(2048, 8192),
    sequences=(1, 4, 16, 64, 128, 256),
    contexts=(1024, 8192),
    requests_per_s=(2, 8),
    arrivals_s=20,
    clients=(1, 8, 64),
    clip_s=16,
    side=8192,
    copied_bytes=2**32,
    blocks=0,
)
# Sizes of Qwen/Qwen3-VL-8B-Instruct, from its config.json; its tower has no windows.
_QWEN3_VL_8B = replace(
    _QWEN2_5_VL_7B,
    shape=replace(
        _QWEN2_5_VL_7B.shape,
        hidden=4096,
        layers=36,
        heads=32,
        kv_heads=8,
        intermediate=12288,
        mrope_section=(24, 20, 20),
        rope_theta=5e6,
        tower_hidden=1152,
        tower_depth=27,
        tower_heads=16,
        tower_intermediate=4304,
        min_pixels=4096,
        max_pixels=25_165_824,  # of all frames together
        context_tokens=262_144,
        patch_px=16,
    ),
    vocabulary=151_936,
    deepstack=DeepStack((8, 16, 24), place_count=2304, head_dim=128),
)
# To try the benchmark itself, on any processor.
_TINY = Target(
    replace(TINY, context_tokens=4096),
    vocabulary=None,
    deepstack=None,
    law=replace(TINY, layers=2),
    law_prompts=(1, 17, 40),
    law_rates=(0.9,),
    law_chunk=32,
    grids=(Grid(2, 4, 4), Grid(2, 3, 5)),
    budgets=(32,),
    prompts=(64, 256),
    chunks=(64,),
    sequences=(1, 4),
    contexts=(32,),
    requests_per_s=(20,),
    arrivals_s=0.2,
    clients=(1, 4),
    clip_s=2,
    side=256,
    copied_bytes=2**20,
    blocks=512,
)
PUBLISHED = ("qwen2.5-vl-7b", "qwen3-vl-8b")
TARGETS: Mapping[str, Target] = {
    "qwen2.5-vl-7b": _QWEN2_5_VL_7B,
    "qwen3-vl-8b": _QWEN3_VL_8B,
    "tiny": _TINY,
    "tiny-qwen3-vl": replace(
        _TINY,
        shape=replace(
            _TINY.shape, mrope_section=(4, 2, 2), min_pixels=4 * 64 * 64, max_pixels=8 * 128 * 128, patch_px=16
        ),
        deepstack=DeepStack((0, 1), place_count=36, head_dim=16),
    ),
}


# What both layouts' configs have.
_TEXT_NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "bos_token_id",
    "eos_token_id",
)
_VISION_NAMES = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "patch_size",
    "spatial_merge_size",
    "temporal_patch_size",
    "out_hidden_size",
)
_TOKEN_NAMES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@contextmanager
def written(whole: Any, shape: Shape) -> Iterator[Path]:
    """A temporary folder with the checkpoint of transformers' model of a shape."""
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder), whole, make_tokenizer(shape), shape)
        yield Path(folder)


def drawn(target: Target, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' model of the target."""
    config, model_class = layout(target, make_tokenizer(target.shape))
    config.dtype = dtype
    with torch.device(device):
        model = model_class._from_config(config, dtype=dtype)
        randomise(model, target.shape.init_range, seed=0)
    return model.eval()


def language_model(whole: Any) -> LanguageModel:
    """The engine's model with the weights of transformers', of which it keeps copies only where it rearranges them."""
    theirs, config = whole.model.language_model, deepcopy(whole.config)
    text = make_text(type(theirs), type(theirs.rotary_emb), config.text_config, whole.device)
    fill(text, theirs.state_dict(), "")
    with torch.device("meta"):
        lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
    fill(lm_head, whole.lm_head.state_dict(), "")
    return assemble(config, text, lm_head, embed_levels=0)


def layout(target: Target, tokenizer: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    """Config of the target's checkpoint, and transformers' class of its model."""
    config: Any = make_config(target.shape, tokenizer)
    config.text_config.vocab_size = target.vocabulary or config.text_config.vocab_size
    if (deepstack := target.deepstack) is None:
        return config, Qwen2_5_VLForConditionalGeneration
    text = {name: getattr(config.text_config, name) for name in _TEXT_NAMES}
    rope = {**config.text_config.rope_parameters, "mrope_interleaved": True}
    vision = {name: getattr(config.vision_config, name) for name in _VISION_NAMES}
    qwen3_vl = Qwen3VLConfig(
        text_config={**text, "head_dim": deepstack.head_dim, "rope_parameters": rope},
        vision_config={
            **vision,
            "deepstack_visual_indexes": list(deepstack.indexes),
            "num_position_embeddings": deepstack.place_count,
        },
        **{name: getattr(config, name) for name in _TOKEN_NAMES},
        tie_word_embeddings=target.shape.tie_word_embeddings,
    )
    return qwen3_vl, Qwen3VLForConditionalGeneration
