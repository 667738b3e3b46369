"""Loads the parts of LoRA adapters that are for the vision tower and its projector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import structlog

from gridsieve.common.adapter_folder import AdapterFolder
from gridsieve.services.compute.adapter_files import read_adapters, unsupported
from gridsieve.services.compute.adapters import LowRank
from gridsieve.services.encoder.tower.adapted import Adaptable, AdaptedForward
from gridsieve.services.encoder.tower.tower import ModelForward, Tower

log = structlog.get_logger()


def with_adapters(tower: Tower, folders: Sequence[AdapterFolder]) -> Tower:
    """The tower with adapters, each of which has a forward if it changes the tower.

    Raises StartupError, with the adapter's name, for an unsupported one.
    """
    adapters, additions = dict[str, bytes](), dict[bytes, Mapping[str, LowRank]]()
    for files in read_adapters(folders, tower.device):
        name, digest, part = files.folder.name, files.digest, files.tower
        adapters[name] = digest
        if part.sides:
            if tower.adaptable is None:
                layer = part.trained_name(min(part.sides))
                raise unsupported(
                    files.folder, f"{layer}, of a tower that takes none (with --tower-tensor-parallel, none does)"
                )
            additions[digest] = part.additions(tower.adaptable.layers, tower.dtype)
        facts = {"adapter": name, "digest": digest.hex()[:12], "path": str(files.folder.path)}
        log.info("adapter loaded", **facts, layers=len(part.sides), in_tower=bool(part.sides))
    tower = replace(tower, adapters=adapters)
    return replace(tower, adapted=_forwards(tower, tower.adaptable, additions)) if additions else tower


def _forwards(
    tower: Tower, adaptable: Adaptable | None, additions: Mapping[bytes, Mapping[str, LowRank]]
) -> dict[bytes, AdaptedForward]:
    """One with each adapter, by digest."""
    plain = tower.forward
    assert adaptable is not None
    assert isinstance(plain, ModelForward)
    matrices = adaptable.matrices(additions)
    compute, layers = adaptable.with_added(matrices.added, plain.layers)
    forward = replace(plain, compute=compute, layers=layers)
    return {digest: AdaptedForward(forward, matrices, digest) for digest in additions}
