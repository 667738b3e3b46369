"""Loads the parts of LoRA adapters that are for the vision tower and its projector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import structlog
import torch

from gridsieve.common.adapter_folder import AdapterFolder
from gridsieve.services.compute.adapter_files import read_adapters, unsupported
from gridsieve.services.encoder.tower.tower import ModelForward, Tower

log = structlog.get_logger()


def with_adapters(tower: Tower, folders: Sequence[AdapterFolder]) -> Tower:
    """The tower with adapters, each of which has a forward without graphs if it changes the tower.

    Raises StartupError, with the adapter's name, for an unsupported one.
    """
    adapters, adapted = dict(tower.adapters), dict(tower.adapted)
    for files in read_adapters(folders, tower.device):
        name, digest, part = files.folder.name, files.digest, files.tower
        adapters[name] = digest
        if part.sides:
            if tower.adaptable is None:
                layer = part.trained_name(min(part.sides))
                raise unsupported(
                    files.folder, f"{layer}, of a tower that takes none (with --tower-tensor-parallel, none does)"
                )
            if tower.dtype == torch.float16:
                raise files.folder.refusal("it changes the vision tower, which must not run in float16 (--dtype)")
            additions = part.additions(tower.adaptable.layers, tower.dtype)
            forward = tower.forward
            assert isinstance(forward, ModelForward)
            adapted[digest] = replace(forward, compute=tower.adaptable.with_additions(additions), layers=())
        facts = {"adapter": name, "digest": digest.hex()[:12], "path": str(files.folder.path)}
        log.info("adapter loaded", **facts, layers=len(part.sides), in_tower=bool(part.sides))
    return replace(tower, adapters=adapters, adapted=adapted)
