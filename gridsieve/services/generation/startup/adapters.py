"""Loads the parts of LoRA adapters that are for the language model, each rank those of its own features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import structlog
import torch

from gridsieve.common.adapter_folder import AdapterFolder
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.plan import tagged_digest
from gridsieve.services.compute.adapter_files import read_adapters
from gridsieve.services.compute.adapters import Features, LowRank
from gridsieve.services.compute.int4_linear import Int4Linear
from gridsieve.services.compute.parts import part
from gridsieve.services.generation.model.adapters import AdaptedLinear
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.parallel.group import Group
from gridsieve.services.generation.request.request import Adapter

_DOMAIN = b"gridsieve adapter v1"

log = structlog.get_logger()


def load_adapters(folders: Sequence[AdapterFolder], model: LanguageModel, group: Group | None = None) -> None:
    """Adds adapters to a model that has none. Raises StartupError, with the adapter's name, for an unsupported one.

    group: of the ranks of a sharded model, each of which loads all adapters.
    """
    if not folders:
        return
    modules: dict[str, Any] = dict(model.text.named_modules())
    assert not any(isinstance(each, AdaptedLinear) for each in modules.values()), "the model has adapters already"
    layers = {
        name: Features(each.in_features, each.out_features)
        for name, each in modules.items()
        if hasattr(each, "in_features") and ".experts." not in name
    }
    digests: list[bytes] = []
    for files in read_adapters(folders, model.device):
        additions = {
            name: _of_rank(addition, modules[name], group)
            for name, addition in files.text.additions(layers, model.dtype).items()
        }
        adapter = Adapter(files.folder.name, files.digest, in_tower=bool(files.tower.sides))
        model.adapters.attach(adapter, model.text, additions)
        digests.append(files.digest)
        ranks = sorted({addition.down.shape[0] for addition in additions.values()})
        facts = {"adapter": adapter.name, "digest": adapter.digest.hex()[:12], "path": str(files.folder.path)}
        log.info("adapter loaded", **facts, layers=len(additions), ranks=ranks, in_tower=adapter.in_tower)
    if group and not group.agree(int.from_bytes(tagged_digest(_DOMAIN, digests)[:7])):
        raise StartupError("--adapters: the ranks have read different files")


def _of_rank(addition: LowRank, layer: Any, group: Group | None) -> LowRank:
    """The part of an addition for a rank that has some columns of the layer, some of its rows, or all."""
    if group is None:
        return addition
    rows, columns = layer.int4.shape if isinstance(layer, Int4Linear) else layer.weight.shape
    if getattr(layer, "output_is_whole", False):
        return addition
    if columns < layer.in_features:
        return LowRank(part(addition.down, 1, group.rank, group.ranks), addition.up, group.total)
    if rows == layer.out_features:
        return addition
    halves = addition.up.chunk(2) if getattr(layer, "packed", False) else (addition.up,)
    alike = getattr(layer, "ranks_alike", 1)
    own = [part(each, 0, group.rank // alike, group.ranks // alike) for each in halves]
    return replace(addition, up=torch.cat(own))
