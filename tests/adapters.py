"""LoRA adapters as PEFT makes and writes them, and transformers' models as PEFT computes them with these."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn


def write_adapter(model: nn.Module, folder: Path, seed: int = 1, **config: Any) -> Any:
    """A random adapter that changes answers, written by PEFT; returns a copy of `model` with it in its layers."""
    adapted: Any = copy.deepcopy(model)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        # B is random where PEFT begins with nothing that training asks for, and zero else.
        get_peft_model(adapted, LoraConfig(init_lora_weights=False, **config)).save_pretrained(folder)
    return adapted.eval()
