"""The supported vision towers, by model type. A new family adds a file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.retention import usual_method
from gridsieve.services.encoder.families import (
    cosmos3_edge,
    glm4v,
    internvl,
    llava,
    llava_next_video,
    llava_onevision,
    minicpmv,
    minicpmv4_6,
    mistral3,
    nemotron_h_omni,
    nemotron_nano_vl,
    qwen,
    video_llama_3,
)
from gridsieve.services.encoder.tower.attention import Wanted
from gridsieve.services.encoder.tower.parallel.division import Share
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.services.encoder.tower.vision_model import RunOptions

# Of whose layers a rank can have a share.
DIVISIBLE: Mapping[str, Callable[[Checkpoint, RunOptions], Tower]] = {
    "glm4v": glm4v.load,
    "glm4v_moe": glm4v.load,
    "glm46v": glm4v.load,
    "qwen2_vl": qwen.load_qwen2_vl,
    "qwen2_5_vl": qwen.load_qwen2_5_vl,
    "qwen3_5": qwen.load_qwen3_5,
    "qwen3_5_moe": qwen.load_qwen3_5,
    "qwen3_vl": qwen.load_qwen3_vl,
    "qwen3_vl_moe": qwen.load_qwen3_vl,
}
FAMILIES: Mapping[str, Callable[[Checkpoint, RunOptions], Tower]] = {
    **DIVISIBLE,
    "NemotronH_Nano_VL_V2": nemotron_nano_vl.load,
    "cosmos3_edge": cosmos3_edge.load,
    "internvl": internvl.load,
    "llava": llava.load,
    "llava_next_video": llava_next_video.load,
    "llava_onevision": llava_onevision.load,
    "minicpmv": minicpmv.load,
    "minicpmv4_6": minicpmv4_6.load,
    "minicpmv4_7": minicpmv4_6.load,
    "mistral3": mistral3.load,
    "nemotron_h_omni": nemotron_h_omni.load,
    "video_llama_3": video_llama_3.load,
}


def load_tower(
    checkpoint: Checkpoint, dtype: str, device: torch.device, attention: Wanted = "auto", share: Share | None = None
) -> Tower:
    """The checkpoint's vision tower, on `device`, in `dtype` ("auto": see `weights.choose_dtype`).

    share: of its layers; None: all of them.
    Raises StartupError for an unsupported model type, an incomplete checkpoint, an unavailable attention, or a tower
    that cannot be divided.
    """
    load = checkpoint.pick(FAMILIES)
    if share and checkpoint.model_type not in DIVISIBLE:
        raise StartupError(
            f"--tower-tensor-parallel {share.ranks}: the towers of {checkpoint.model_type} are not divided, only those "
            f"of {', '.join(sorted(DIVISIBLE))}; --data-parallel takes all families"
        )
    tower = load(checkpoint, RunOptions(dtype, device, attention, share))
    return replace(tower, usual_method=usual_method(tower.pruning_methods, checkpoint.config))
