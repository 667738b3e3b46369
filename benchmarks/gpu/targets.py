"""What the GPU benchmark measures: models of published sizes, and the loads for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.models import QWEN2_5_VL_3B, DeepStack, Layout
from demo.checkpoint import TINY
from gridsieve.common.contract.plan import Grid


@dataclass(frozen=True, slots=True)
class Target:
    """A model and the sizes to measure it with.

    grids: videos for the tower. budgets: tokens of the largest forwards that graphs are captured for.
    prompts: numbers of tokens to prefill, in each of `chunks`. contexts: of decode steps of each of `sequences`.
    steps: that decode, measured of each kind.
    clients: of the whole stack, which ask about clips of clip_s seconds.
    side: of the square matrices whose product measures peak arithmetic.
    blocks: of the engine's KV cache on the CPU; on CUDA it fills the memory.
    """

    layout: Layout
    grids: tuple[Grid, ...]
    budgets: tuple[int, ...]
    prompts: tuple[int, ...]
    chunks: tuple[int, ...]
    steps: int
    sequences: tuple[int, ...]
    contexts: tuple[int, ...]
    clients: tuple[int, ...]
    clip_s: int
    side: int
    copied_bytes: int
    blocks: int


# Sizes of Qwen/Qwen2.5-VL-7B-Instruct, from its config.json.
_QWEN2_5_VL_7B_SHAPE = replace(
    QWEN2_5_VL_3B.shape,
    hidden=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    intermediate=18944,
    tie_word_embeddings=False,
    max_pixels=448 * 448,
    context_tokens=128_000,
)
_QWEN2_5_VL_7B = Target(
    Layout(_QWEN2_5_VL_7B_SHAPE, vocabulary=152_064),
    grids=(Grid(16, 24, 30), Grid(8, 8, 8), Grid(6, 9, 11)),
    budgets=(2048, 16384),
    prompts=(2048, 4096, 8192, 16384, 32768),
    chunks=(2048, 8192),
    steps=32,
    sequences=(1, 4, 16, 64, 128, 256),
    contexts=(1024, 8192),
    clients=(1, 8, 64),
    clip_s=16,
    side=8192,
    copied_bytes=2**32,
    blocks=0,
)
# Sizes of Qwen/Qwen3-VL-8B-Instruct, from its config.json; its tower has no windows.
_QWEN3_VL_8B = replace(
    _QWEN2_5_VL_7B,
    layout=Layout(
        replace(
            _QWEN2_5_VL_7B_SHAPE,
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
    ),
)
# To try the benchmark itself, on any processor.
_TINY = Target(
    Layout(replace(TINY, context_tokens=4096)),
    grids=(Grid(2, 4, 4), Grid(2, 3, 5)),
    budgets=(32,),
    prompts=(64, 256),
    chunks=(64,),
    steps=4,
    sequences=(1, 4),
    contexts=(32,),
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
}
