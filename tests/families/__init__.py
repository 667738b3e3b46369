"""Model families for tests: tiny random checkpoints, and the classes of transformers to compare with.

Each module here adds its FAMILIES, whose model types must be those of the rows of `gridsieve.families`. This package
does not import services.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch

from tests.families import cosmos3_edge, minicpm, nemotron_nano
from tests.families.family import FamilyUnderTest as FamilyUnderTest
from tests.families.internvl import INTERNVL_PX as INTERNVL_PX
from tests.families.llava import LLAVA as LLAVA
from tests.families.llava import LLAVA_PROCESSORS as LLAVA_PROCESSORS
from tests.families.llava import NEWLINE_ID as NEWLINE_ID
from tests.families.llava import NEXT_VIDEO_PX as NEXT_VIDEO_PX
from tests.families.llava import ONEVISION_PATCH as ONEVISION_PATCH
from tests.families.llava import ONEVISION_PX as ONEVISION_PX
from tests.families.qwen import QWEN3_5 as QWEN3_5
from tests.families.qwen import write_qwen3_5 as write_qwen3_5
from tests.families.qwen import write_qwen3_vl_heads as write_qwen3_vl_heads
from tests.families.qwen import write_qwen3_vl_moe as write_qwen3_vl_moe
from tests.families.qwen import write_qwen3_vl_reader as write_qwen3_vl_reader

FAMILIES: Mapping[str, FamilyUnderTest] = {
    name: each
    for module in iter_modules(__path__, f"{__name__}.")
    for name, each in getattr(import_module(module.name), "FAMILIES", {}).items()
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
