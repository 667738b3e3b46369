"""A runner as settings ask for it: every rank makes its own, in the same way and the same order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common.checkpoint import Checkpoint
from common.errors import StartupError
from services.generation.families import load_language_model
from services.generation.families.language_model import LanguageModel
from services.generation.graphs import CudaCapture
from services.generation.runner import Followers, Runner
from services.generation.settings import GenerationSettings

if TYPE_CHECKING:
    from services.generation.parallel.group import Group

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Built:
    """blocks: of the cache; limit_tokens: of one prompt and its answer."""

    runner: Runner
    blocks: int
    limit_tokens: int


def build(
    settings: GenerationSettings,
    checkpoint: Checkpoint,
    group: Group | None = None,
    followers: Followers | None = None,
) -> Built:
    """group: of this rank; followers: on rank 0, the others. Raises StartupError for what cannot be as settings say."""
    device = device_of(settings, group.rank if group else 0)
    model = load_language_model(checkpoint, _dtype(settings, checkpoint), device, group)
    blocks = -(-settings.kv_cache_tokens // BLOCK_TOKENS)
    limit_tokens = _limit_tokens(settings, model, blocks * BLOCK_TOKENS)
    runner = Runner(model, blocks, BLOCK_TOKENS, followers)
    if model.device.type == "cuda":
        captured = runner.capture_decoding(settings.max_running_requests, limit_tokens, CudaCapture())
        if group and not group.least(int(captured)):  # all replay a step, or none does
            runner.decode_eagerly()
    return Built(runner, blocks, limit_tokens)


def device_of(settings: GenerationSettings, rank: int = 0) -> torch.device:
    """A rank's device: that of the settings, or on CUDA so many further. Raises StartupError if it cannot be used."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if settings.device == "auto" else settings.device
    try:
        device = torch.device(name)
        if device.type == "cuda" and settings.tensor_parallel > 1:
            first, found = device.index or 0, torch.cuda.device_count()
            if first + settings.tensor_parallel > found:
                raise StartupError(
                    f"--tensor-parallel {settings.tensor_parallel} wants as many CUDA devices from cuda:{first} on, "
                    f"there are {found} in all"
                )
            device = torch.device("cuda", first + rank)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        raise StartupError(f"--device {name} cannot be used: {error}") from error
    return device


def _limit_tokens(settings: GenerationSettings, model: LanguageModel, cache_tokens: int) -> int:
    most = min(model.context_tokens, cache_tokens)
    if settings.max_prompt_tokens is None:
        return most
    if settings.max_prompt_tokens > most:
        raise StartupError(
            f"--max-prompt-tokens {settings.max_prompt_tokens} is more than the model's context of "
            f"{model.context_tokens} tokens or the cache's {cache_tokens} (--kv-cache-tokens)"
        )
    return settings.max_prompt_tokens


def _dtype(settings: GenerationSettings, checkpoint: Checkpoint) -> torch.dtype:
    config = checkpoint.config
    own = config.get("dtype") or config.get("torch_dtype") or (config.get("text_config") or {}).get("dtype")
    name = (own or "float32") if settings.dtype == "auto" else settings.dtype
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise StartupError(f"config.json: dtype must name a floating-point type, got {name!r}")
    return dtype
