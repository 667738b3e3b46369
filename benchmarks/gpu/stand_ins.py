"""Replaces FlashInfer's kernels and CUDA graphs by plain functions on the CPU, to try a call without a card."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gridsieve.services.compute.graphs import Capture, Captured, CudaCapture
from gridsieve.services.generation.model import attention


def plain_kernels(device: torch.device) -> AbstractContextManager[object]:
    """Runners that are made inside read their cache in place; on CUDA they do so by themselves."""
    if device.type == "cuda":
        return nullcontext()
    kernels: Any = importlib.import_module("tests.generation.paged_kernels")
    return patch.object(attention, "find_kernels", kernels.Kernels)


def capture_on(device: torch.device) -> Capture:
    """CUDA graphs, or functions that are called again."""
    return CudaCapture(device) if device.type == "cuda" else _computed_again


def _computed_again(inputs: Sequence[Tensor], compute: Callable[[], Tensor]) -> Captured:
    output = compute().clone()

    def replay() -> None:
        output.copy_(compute())

    return Captured(replay, output)
