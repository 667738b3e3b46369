"""How a checkpoint says that its weights are quantised."""

from __future__ import annotations

from typing import Any

from framesieve.common.checkpoint import Checkpoint


def is_quantised(checkpoint: Checkpoint) -> bool:
    return bool(quantization_settings(checkpoint))


def quantization_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's `quantization_config`; {} if it has none."""
    of_text = checkpoint.text_config.get("quantization_config")
    return dict(checkpoint.config.get("quantization_config") or of_text or {})
