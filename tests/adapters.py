"""LoRA adapters written by PEFT, and transformers' models with them applied by PEFT."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn


def write_adapter(model: nn.Module, folder: Path, seed: int = 1, **config: Any) -> Any:
    """Has PEFT write a random adapter that changes answers; returns a copy of `model` with the adapter applied."""
    adapted: Any = copy.deepcopy(model)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        # With init_lora_weights=False PEFT makes B random; by default B is zero, which changes nothing.
        get_peft_model(adapted, LoraConfig(init_lora_weights=False, **config)).save_pretrained(str(folder))
    return adapted.eval()
