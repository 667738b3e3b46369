"""Model families for tests: tiny random checkpoints, and the classes of transformers to compare with.

Each module here adds its FAMILIES, whose model types must be those of the rows of `gridsieve.families`. This package
does not import services.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch
from transformers import Cosmos3EdgeForConditionalGeneration

from tests import cosmos3_edge, minicpm, minicpmv4_6, nemotron, nemotron_nano
from tests.families.family import FamilyUnderTest as FamilyUnderTest
from tests.families.internvl import INTERNVL_PX as INTERNVL_PX
from tests.families.llava import LLAVA as LLAVA
from tests.families.llava import LLAVA_PROCESSORS as LLAVA_PROCESSORS
from tests.families.llava import NEWLINE_ID as NEWLINE_ID
from tests.families.llava import NEXT_VIDEO_PX as NEXT_VIDEO_PX
from tests.families.llava import ONEVISION_PATCH as ONEVISION_PATCH
from tests.families.llava import ONEVISION_PX as ONEVISION_PX
from tests.families.qwen import QWEN3_5 as QWEN3_5
from tests.families.qwen import write_qwen3_vl_heads as write_qwen3_vl_heads
from tests.families.qwen import write_qwen3_vl_moe as write_qwen3_vl_moe


def _write_minicpm(folder: Path, seed: int, version: str) -> Path:
    minicpm.write(folder, seed, version)
    return folder


def write_minicpmv4_6(folder: Path, seed: int, model_type: str = "minicpmv4_6", mode: str = "16x") -> Path:
    """mode: downsample_mode of tower and processors."""
    minicpmv4_6.write(folder, seed, QWEN3_5["text"], model_type, mode)
    return folder


def _write_nemotron(folder: Path, seed: int) -> Path:
    nemotron.write(folder, seed)
    return folder


def _write_nemotron_nano(folder: Path, seed: int) -> Path:
    nemotron_nano.write(folder, seed)
    return folder


FAMILIES: Mapping[str, FamilyUnderTest] = {
    **{
        f"minicpmv_{version.replace('.', '_')}": FamilyUnderTest(
            partial(_write_minicpm, version=version),
            minicpm.TEXT_CLASSES[version][1],
            patch_px=minicpm.PATCH_PX,
            merge=1,
            hidden=minicpm.WIDTH,
            slices_stand_alone=True,
            text_prefix="llm.model.",
            lm_head="llm.lm_head.weight",
            linear=True,
            rows_stand_alone=True,
            model_type="minicpmv",
        )
        for version in ("2.5", "2.6", "4.0", "4.5")
    },
    **{
        name: FamilyUnderTest(
            partial(write_minicpmv4_6, model_type=name),
            model,
            patch_px=minicpmv4_6.PATCH_PX,
            merge=4,
            slices_stand_alone=True,
            linear=name == "minicpmv4_6",
            rows_stand_alone=name == "minicpmv4_6",
        )
        for name, (_, model) in minicpmv4_6.CLASSES.items()
    },
    "cosmos3_edge": FamilyUnderTest(
        cosmos3_edge.write,
        Cosmos3EdgeForConditionalGeneration,
        patch_px=cosmos3_edge.PATCH_PX,
        merge=cosmos3_edge.MERGE,
        hidden=cosmos3_edge.HIDDEN,
        slices_stand_alone=True,
        channels_last=True,
    ),
    "nemotron_h_omni": FamilyUnderTest(
        _write_nemotron,
        nemotron.MODEL,
        patch_px=nemotron.PATCH_PX,
        merge=nemotron.MERGE,
        temporal_patch=nemotron.TUBELET,
        slices_stand_alone=True,
        text_prefix="language_model.backbone.",
        lm_head="language_model.lm_head.weight",
        linear=True,
    ),
    "nemotron_nano_vl": FamilyUnderTest(
        _write_nemotron_nano,
        nemotron.MODEL,
        patch_px=nemotron.PATCH_PX,
        merge=nemotron.MERGE,
        slices_stand_alone=True,
        text_prefix="language_model.backbone.",
        lm_head="language_model.lm_head.weight",
        linear=True,
        side=nemotron_nano.SIDE_PX // nemotron.PATCH_PX // nemotron.MERGE,
        model_type=nemotron_nano.MODEL_TYPE,
    ),
    **{
        name: each
        for module in iter_modules(__path__, f"{__name__}.")
        for name, each in getattr(import_module(module.name), "FAMILIES", {}).items()
    },
}
QWEN = sorted(name for name in FAMILIES if name.startswith("qwen"))


def vision_of(model: Any) -> Any:
    """The vision tower of a whole model of transformers, whose `pooler_output` are tokens."""
    inner = model.model
    return cosmos3_edge.Vision(inner) if model.config.model_type == "cosmos3_edge" else inner.visual


def text_and_head(reference: Any) -> tuple[Any, Any]:
    """The text model and the output layer of what `load_reference` gives; of Nemotron they are one model."""
    inner = reference._modules.get("language_model")
    if inner is not None:
        return inner.model, inner.lm_head
    text = getattr(reference.model, "language_model", None)
    return reference.model.text_model if text is None else text, reference.lm_head


def load_reference(name: str, folder: Path) -> Any:
    """The whole model in transformers, in float32 with plain attention; of MiniCPM-V the language model."""
    if FAMILIES[name].model_type == "minicpmv":
        return minicpm.read_text(folder)
    if FAMILIES[name].model_type == nemotron_nano.MODEL_TYPE:
        return nemotron_nano.read(folder)
    model: Any = FAMILIES[name].model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()
