"""The device of a process, and the names of the dtypes that it computes in."""

from __future__ import annotations

import torch

from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.tensors import DType

TORCH_DTYPES = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16, DType.FLOAT32: torch.float32}
"""The dtypes of embeddings on the wire."""


def device_of(name: str, flag: str, ranks: int, rank: int = 0) -> torch.device:
    """The device of one of several ranks.

    name: the setting `--device`: cpu, cuda, cuda:N, or auto, which is CUDA where it is available. Rank n has the nth
        CUDA device from this one on.
    flag: of the setting that says how many ranks there are.
    Raises StartupError if torch cannot use the device, or if the machine has fewer of them than ranks.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and ranks > 1:
            first, found = device.index or 0, torch.cuda.device_count()
            if first + ranks > found:
                raise StartupError(
                    f"{flag} {ranks} needs as many CUDA devices, starting at cuda:{first}; this machine has {found}"
                )
            device = torch.device("cuda", first + rank)
        # `cuda` has no index, and would not equal the device of its own tensors.
        device = torch.zeros(1, device=device).device
    except (RuntimeError, AssertionError) as error:  # AssertionError: from builds of torch without CUDA
        raise StartupError(f"--device {name} cannot be used: {error}") from error
    return device


def name_of(dtype: torch.dtype) -> str:
    """float32, bfloat16, …"""
    return str(dtype).removeprefix("torch.")


def multiplies_bfloat16() -> bool:
    """Whether oneDNN has kernels for bfloat16 on this processor. Without, products take many times longer."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
