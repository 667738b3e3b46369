"""How a checkpoint says that its weights are quantised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from gridsieve.common.checkpoint import Checkpoint

# To what the linear layers of a checkpoint are rounded while they are read.
Quantization: TypeAlias = Literal["none", "int4", "fp8"]
# Scales of activations and of cached keys and values. Weights that are dequantised are multiplied by rows as they are.
OF_ACTIVATIONS = re.compile(r"\.((input|output|activation)_scale|[kv]_scale)$")


def is_quantised(checkpoint: Checkpoint) -> bool:
    return bool(quantization_settings(checkpoint))


def quantization_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's `quantization_config`, with its nulls, which transformers tells from absence; {} without one."""
    of_whole, of_text = (each.part("quantization_config") for each in (checkpoint.config, checkpoint.text_config))
    return dict((of_whole or of_text).written)


def compressed_groups(settings: Mapping[str, Any], layout: str) -> list[Mapping[str, Any]]:
    """The groups of layers of compressed-tensors, if all are stored in this format and none is transformed; else []."""
    groups = list((settings.get("config_groups") or {}).values())
    fits = (
        settings.get("quant_method") == "compressed-tensors"
        and settings.get("format") == layout
        and not settings.get("transform_config")
        and all(each.get("weights") and each.get("format") in (None, layout) for each in groups)
    )
    return groups if fits else []
