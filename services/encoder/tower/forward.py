"""One forward of a tower's model over packed slices, its geometry made on the host and sent along with the patches.

Nothing in it waits for the device. It knows no family, and nothing of where slices come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from services.encoder.tower.packing import Array, Geometry, Side, TowerShape, lay_out


@dataclass(frozen=True, slots=True)
class ModelForward:
    """A tower's model, run on slices of any sizes.

    compute: patches uint8 (P, patch_values) and their geometry, to (1 + embed_levels, P / merge², embed_dim).
    varlen: attention reads where sequences end on the device, so that a graph of `compute` follows the geometry;
        otherwise on the host, once a forward.
    """

    compute: Callable[[Tensor, Geometry[Tensor]], Tensor]
    shape: TowerShape
    device: torch.device
    varlen: bool

    def __call__(self, patches: Tensor, sides: Sequence[Side]) -> Tensor:
        return self.compute(patches, self._send(lay_out(sides, self.shape)))

    def _send(self, geometry: Geometry[Array]) -> Geometry[Tensor]:
        here = geometry.map(torch.from_numpy)
        sent = here.map(partial(send, device=self.device))
        return sent if self.varlen else sent.with_ends_of(here)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """It on the device: from the host to CUDA by way of pinned memory, so that nobody waits for it."""
    return pin(tensor, device).to(device, non_blocking=True)


def pin(tensor: Tensor, device: torch.device) -> Tensor:
    """What is copied to the device instead of it, if nobody is to wait."""
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
