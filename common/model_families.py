"""The model families that the services know, and what each can do. docs/models.md says it in full.

Each service has its own registry with the same model types.
"""

from __future__ import annotations

from dataclasses import dataclass

from framesieve.common.contract.plan import Modality
from framesieve.common.contract.retention import METHODS, NONE

_BOTH = (Modality.IMAGE, Modality.VIDEO)
_PRUNING = tuple(method for method in METHODS if method != NONE)


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One model type.

    models: published ones. media: what a prompt may hold. methods: that prune its videos. positions: of its language
    model. limits: what it cannot do that others can.
    """

    model_type: str
    models: str
    media: tuple[Modality, ...]
    methods: tuple[str, ...]
    positions: str
    limits: str = ""


MODEL_FAMILIES = (
    ModelFamily("qwen2_vl", "Qwen2-VL", _BOTH, _PRUNING, "M-RoPE"),
    ModelFamily("qwen2_5_vl", "Qwen2.5-VL", _BOTH, _PRUNING, "M-RoPE, time in seconds"),
    ModelFamily("qwen3_vl", "Qwen3-VL", _BOTH, _PRUNING, "M-RoPE, timestamps as text"),
    ModelFamily("qwen3_vl_moe", "Qwen3-VL, mixture of experts", _BOTH, _PRUNING, "M-RoPE, timestamps as text"),
    ModelFamily(
        "llava",
        "LLaVA 1.5, Pixtral, and others in LLaVA's layout: CLIP, SigLIP or Pixtral with Llama, Mistral or Qwen2",
        (Modality.IMAGE,),
        (),
        "one-dimensional",
        "no videos; no float16 tower",
    ),
    ModelFamily(
        "minicpmv",
        "MiniCPM-V 2.5, 2.6, 4.0, 4.5",
        _BOTH,
        (),
        "one-dimensional",
        "2.5: no videos; no pruning; no float16 tower; no quantised checkpoints",
    ),
    ModelFamily(
        "mistral3", "Mistral Small 3.1, 3.2", (Modality.IMAGE,), (), "one-dimensional", "no videos; no float16 tower"
    ),
    ModelFamily("internvl", "InternVL 2.5, 3 (-hf)", _BOTH, _PRUNING, "one-dimensional", "no float16 tower"),
    ModelFamily("llava_next_video", "LLaVA-NeXT-Video", _BOTH, _PRUNING, "one-dimensional", "no float16 tower"),
    ModelFamily("llava_onevision", "LLaVA-OneVision", _BOTH, _PRUNING, "one-dimensional", "no float16 tower"),
)
