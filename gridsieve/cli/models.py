"""The command `gridsieve models`, which prints the model families and what each can do. docs/models.md says more."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import typer

from gridsieve.cli.options import JsonOption, print_json
from gridsieve.common.contract.plan import Modality
from gridsieve.common.contract.retention import AFTER_TOWER, BEFORE_TOWER, METHODS, NONE
from gridsieve.common.minicpmv import PRUNING_METHODS_OF_PLACES

_BOTH = (Modality.IMAGE, Modality.VIDEO)
_PRUNING = tuple(method for method in METHODS if method != NONE)
_AFTER_TOWER = tuple(method for method in AFTER_TOWER if method != NONE)
_OF_MINICPM = tuple(method for method in PRUNING_METHODS_OF_PLACES if method != NONE)


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
    ModelFamily("qwen3_5", "Qwen3.5, 3.6, 3.8", _BOTH, _PRUNING, "M-RoPE, timestamps as text"),
    ModelFamily("qwen3_5_moe", "Qwen3.5, 3.6, 3.8, mixture of experts", _BOTH, _PRUNING, "M-RoPE, timestamps as text"),
    ModelFamily("cosmos3_edge", "Cosmos 3 Edge", _BOTH, _PRUNING, "M-RoPE, timestamps as text", "no float16 tower"),
    ModelFamily("glm4v", "GLM-4.1V, GLM-4.6V-Flash", _BOTH, _PRUNING, "M-RoPE, timestamps as text"),
    ModelFamily("glm46v", "GLM-4.6V-Flash", _BOTH, _PRUNING, "M-RoPE, timestamps as text"),
    ModelFamily("glm4v_moe", "GLM-4.5V, GLM-4.6V, mixtures of experts", _BOTH, _PRUNING, "M-RoPE, timestamps as text"),
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
        "2.5: no videos; no pruning; no float16 tower; quantised checkpoints in 4 bits only",
    ),
    ModelFamily("minicpmv4_6", "MiniCPM-V 4.6", _BOTH, _OF_MINICPM, "one-dimensional", "no float16 tower"),
    ModelFamily("minicpmv4_7", "MiniCPM-V 4.7", _BOTH, _OF_MINICPM, "Canvas M-RoPE", "no float16 tower"),
    ModelFamily(
        "mistral3", "Mistral Small 3.1, 3.2", (Modality.IMAGE,), (), "one-dimensional", "no videos; no float16 tower"
    ),
    ModelFamily("internvl", "InternVL 2.5, 3, 3.5 (-hf)", _BOTH, _AFTER_TOWER, "one-dimensional", "no float16 tower"),
    ModelFamily(
        "nemotron_h_omni",
        "Nemotron 3 Nano Omni",
        _BOTH,
        _PRUNING,
        "one-dimensional, read by no layer",
        "no audio; no float16 tower; quantised checkpoints in 4 bits only",
    ),
    ModelFamily(
        "NemotronH_Nano_VL_V2",
        "Nemotron Nano 12B v2 VL",
        _BOTH,
        _PRUNING,
        "one-dimensional, read by no layer",
        "no float16 tower; quantised checkpoints in 4 bits only",
    ),
    ModelFamily("video_llama_3", "VideoLLaMA 3 (-HF)", _BOTH, _AFTER_TOWER, "one-dimensional", "no float16 tower"),
    ModelFamily("llava_next_video", "LLaVA-NeXT-Video", _BOTH, _AFTER_TOWER, "one-dimensional", "no float16 tower"),
    ModelFamily("llava_onevision", "LLaVA-OneVision", _BOTH, _AFTER_TOWER, "one-dimensional", "no float16 tower"),
)


def models(as_json: JsonOption = False) -> None:
    """Print the model families that `gridsieve serve --model` takes, and what each can do.

    A checkpoint's config.json names its model_type.

    Example: gridsieve models --json
    """
    if as_json:
        print_json({"families": [_family_json(each) for each in MODEL_FAMILIES]})
        return
    width = 2 + max(len(family.model_type) for family in MODEL_FAMILIES)
    for family in MODEL_FAMILIES:
        typer.echo(f"{family.model_type:{width}}{family.models}\n{'':{width}}{_abilities(family)}")


def _family_json(family: ModelFamily) -> dict[str, Any]:
    media = [kind.value for kind in family.media]
    return asdict(family) | {"media": media, "before_tower": [each for each in family.methods if each in BEFORE_TOWER]}


def _abilities(family: ModelFamily) -> str:
    media = " and ".join(f"{kind.value}s" for kind in family.media)
    pruning = [
        f"pruned {where} the tower by {', '.join(methods)}"
        for where, acting in (("after", AFTER_TOWER), ("before", BEFORE_TOWER))
        if (methods := [each for each in family.methods if each in acting])
    ]
    return "; ".join(filter(None, (media, *pruning, f"positions {family.positions}", family.limits)))
