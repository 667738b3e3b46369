"""Loads a checkpoint's vision tower, and its sound tower, by the modules of its family that `gridsieve.families`
names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.retention import usual_method
from gridsieve.families import families, family_of
from gridsieve.services.encoder.tower.attention import Wanted
from gridsieve.services.encoder.tower.parallel.division import Share
from gridsieve.services.encoder.tower.sound import SoundTower
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.services.encoder.tower.vision_model import RunOptions


def load_tower(
    checkpoint: Checkpoint,
    dtype: str,
    device: torch.device,
    attention: Wanted = "auto",
    share: Share | None = None,
    hears: bool = True,
) -> Tower:
    """The checkpoint's vision tower, on `device`, in `dtype` ("auto": see `weights.choose_dtype`).

    share: of its layers; None: all of them. hears: whether it has the checkpoint's sound tower, if there is one.
    Raises StartupError for an unsupported model type, an incomplete checkpoint, an unavailable attention, or a tower
    that cannot be divided.
    """
    family = family_of(checkpoint)
    if share and not family.divisible:
        divisible = ", ".join(sorted(name for name, each in families().items() if each.divisible))
        raise StartupError(
            f"--tower-tensor-parallel {share.ranks}: the towers of {checkpoint.model_type} are not divided, only those "
            f"of {divisible}; --data-parallel takes all families"
        )
    options = RunOptions(dtype, device, attention, share)
    load: Callable[[Checkpoint, RunOptions], Tower] = family.load("tower")
    sound: SoundTower | None = family.load("sound")(checkpoint, options) if family.sound and hears else None
    return replace(
        load(checkpoint, options),
        pruning_methods=family.methods,
        why_not_all=family.why_not_all,
        usual_method=usual_method(family.methods, checkpoint.config),
        sound=sound,
    )
