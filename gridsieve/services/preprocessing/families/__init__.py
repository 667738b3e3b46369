"""The model families: a file for each, and a line in FAMILIES. `layouts.family` has their interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.preprocessing.families import glm46v
from gridsieve.services.preprocessing.families.cosmos3_edge import Cosmos3Edge
from gridsieve.services.preprocessing.families.internvl import InternVL
from gridsieve.services.preprocessing.families.llava import Llava
from gridsieve.services.preprocessing.families.llava_next_video import LlavaNextVideo
from gridsieve.services.preprocessing.families.llava_onevision import LlavaOnevision
from gridsieve.services.preprocessing.families.minicpmv import MiniCPMV
from gridsieve.services.preprocessing.families.minicpmv4_6 import MiniCPMV46
from gridsieve.services.preprocessing.families.nemotron_h_omni import NemotronHOmni
from gridsieve.services.preprocessing.families.nemotron_nano_vl import NemotronNanoVL
from gridsieve.services.preprocessing.families.qwen2_5_vl import Qwen25VL
from gridsieve.services.preprocessing.families.qwen2_vl import Qwen2VL
from gridsieve.services.preprocessing.families.qwen3_vl import Qwen3VL
from gridsieve.services.preprocessing.families.video_llama_3 import VideoLlama3
from gridsieve.services.preprocessing.layouts.family import Family

FAMILIES: Mapping[str, Callable[[Checkpoint], Family]] = {
    "NemotronH_Nano_VL_V2": NemotronNanoVL.from_checkpoint,
    "cosmos3_edge": Cosmos3Edge.from_checkpoint,
    "glm4v": glm46v.load,
    "glm4v_moe": glm46v.load,
    "glm46v": glm46v.load,
    "internvl": InternVL.from_checkpoint,
    "llava": Llava.from_checkpoint,
    "llava_next_video": LlavaNextVideo.from_checkpoint,
    "llava_onevision": LlavaOnevision.from_checkpoint,
    "minicpmv": MiniCPMV.from_checkpoint,
    "minicpmv4_6": MiniCPMV46.from_checkpoint,
    "minicpmv4_7": MiniCPMV46.from_checkpoint,
    "mistral3": Llava.from_checkpoint,
    "nemotron_h_omni": NemotronHOmni.from_checkpoint,
    "qwen2_vl": Qwen2VL.from_checkpoint,
    "qwen2_5_vl": Qwen25VL.from_checkpoint,
    "qwen3_5": Qwen3VL.from_checkpoint,
    "qwen3_5_moe": Qwen3VL.from_checkpoint,
    "qwen3_vl": Qwen3VL.from_checkpoint,
    "qwen3_vl_moe": Qwen3VL.from_checkpoint,
    "video_llama_3": VideoLlama3.from_checkpoint,
}


def load_family(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint. Raises StartupError for one that is not supported."""
    return checkpoint.pick(FAMILIES)(checkpoint)
