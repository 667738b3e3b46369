"""A tower that runs a forward each time it is let, a small video for it, and the video's slices."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from common.contract.plan import Grid, MediaPlan, Modality, Run
from common.contract.tensors import DType, TensorBuffer
from services.encoder.items.encoding import Encoding, FrameSlice
from services.encoder.tower.cost import TowerSizes
from services.encoder.tower.patches import PatchShape
from services.encoder.tower.tower import Tower

GRID = Grid(6, 2, 2)
LEVELS, WIDTH = 2, 8
SIZE_BYTES = LEVELS * GRID.tokens * WIDTH * 4
TIMEOUT_S = 10


class GatedTower:
    """Encodes a slice of value v as rows of v (and 100 + v on level 1), one forward each time the gate is opened."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.encoded: list[int] = []

    def encode(self, slices: Sequence[Tensor]) -> list[Tensor]:
        self.started.release()
        assert self.gate.acquire(timeout=TIMEOUT_S)
        self.encoded += [int(frames[0, 0, 0, 0]) for frames in slices]
        if 99 in self.encoded:
            raise RuntimeError("the tower fell")
        levels = torch.tensor([0.0, 100.0])[:, None, None]
        ramp = torch.linspace(0, 1, WIDTH)
        return [(float(frames[0, 0, 0, 0]) * ramp + levels).expand(-1, GRID.slice_tokens, -1) for frames in slices]


TOWER = Tower(
    forward=lambda patches, grids: patches,
    patches=PatchShape(patch_px=1, merge=1, temporal_patch=1),
    embed_dim=WIDTH,
    embed_levels=LEVELS - 1,
    dtype=torch.float32,
    device=torch.device("cpu"),
    sizes=TowerSizes(hidden=1, patch_weights=1, token_weights=0, full_layers=0),
)
VIDEO = MediaPlan(
    modality=Modality.VIDEO,
    grid=GRID,
    runs=(Run(0, GRID.tokens),),
    frames=6,
    frame_height_px=2,
    frame_width_px=2,
    seconds_per_grid=Fraction(1),
    timestamps_s=(),
    content_hash=bytes(32),
)


def slice_of(value: int, index: int, repaired_frames: int = 0) -> FrameSlice:
    buffer = TensorBuffer(DType.UINT8, (1, 2, 2, 3))
    buffer.add(DType.UINT8, (1, 2, 2, 3), 0, bytes([value] * 12))
    return FrameSlice(0, index, buffer, repaired_frames, decoded_ns=0, resized_ns=0)


async def encode_all(encoding: Encoding, gated: GatedTower, values: Sequence[int]) -> None:
    for _ in values:
        gated.gate.release()
    for index, value in enumerate(values):
        await encoding.add(slice_of(value, index))
    while not encoding.complete and not encoding.failure:
        await asyncio.wait_for(encoding.changed(), TIMEOUT_S)
