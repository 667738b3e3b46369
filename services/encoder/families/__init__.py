"""Which vision towers there are. Adding one adds a file and a line here."""

from __future__ import annotations

import torch

from common.checkpoint import Checkpoint
from common.errors import StartupError
from services.encoder.families import qwen2_5_vl
from services.encoder.tower import Tower

_LOADERS = {"qwen2_5_vl": qwen2_5_vl.load}


def load_tower(checkpoint: Checkpoint, dtype: str, device: torch.device) -> Tower:
    """The checkpoint's vision tower, on `device`, in `dtype` ("auto": see `tower.choose_dtype`).

    Raises StartupError for a model type that is not supported, or a checkpoint that is not whole.
    """
    if checkpoint.model_type not in _LOADERS:
        raise StartupError(f"model_type {checkpoint.model_type!r} is not supported, only {', '.join(_LOADERS)}")
    return _LOADERS[checkpoint.model_type](checkpoint, dtype, device)
