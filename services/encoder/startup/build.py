"""The tower of one rank, made as the settings say, by each in the same way: the service is rank 0."""

from __future__ import annotations

import torch

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from services.encoder.families import load_tower
from services.encoder.settings import EncoderSettings
from services.encoder.tower.graphs import with_graphs
from services.encoder.tower.tower import Tower


def load_rank(settings: EncoderSettings, device: torch.device) -> Tower:
    """device: the rank's, of `device_of`. Raises StartupError for what cannot be as the settings say."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    tower = load_tower(Checkpoint(settings.model), settings.dtype, device, settings.tower_attention)
    return with_graphs(tower, settings.batch_tokens)


def device_of(settings: EncoderSettings, rank: int = 0) -> torch.device:
    """The settings' device, or on CUDA as many further as the rank is. Raises StartupError if it cannot be used."""
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and settings.data_parallel > 1:
            first, found = device.index or 0, torch.cuda.device_count()
            if first + settings.data_parallel > found:
                raise StartupError(
                    f"--data-parallel {settings.data_parallel} wants as many CUDA devices from cuda:{first} on, there "
                    f"are {found} in all"
                )
            device = torch.device("cuda", first + rank)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter from builds of torch without CUDA
        raise StartupError(f"--device {name} cannot be used: {error}") from error
    return device
