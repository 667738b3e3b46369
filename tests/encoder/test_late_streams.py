"""Work that is passed from stream to stream waits for what it reads, and the host waits for none of it; memory is not
reused while it is read.

On a stand-in for CUDA whose streams run late; `tests/gpu` runs them on a device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.contract.plan import FrameShape, Grid, MediaPlan, Modality, Run
from gridsieve.services.compute.graphs import Captured
from gridsieve.services.compute.rank_failure import RankFailure
from gridsieve.services.compute.transfers import Computed, Readback, beside
from gridsieve.services.encoder.items.cache import EmbedsCache
from gridsieve.services.encoder.startup.rank import run_shares
from gridsieve.services.encoder.tower.graphs import with_graphs
from gridsieve.services.encoder.tower.packing import PackedLayout, Side, TowerShape
from gridsieve.services.encoder.tower.parallel.exchange import Exchange, announced, unpacked
from gridsieve.services.encoder.tower.parallel.tower import DONE, DataParallelTower
from gridsieve.services.encoder.tower.patches import PatchShape, patchify
from gridsieve.services.encoder.tower.tower import ModelForward, Tower, TowerSizes
from tests.encoder.late_streams import CUDA, LateDevice, LateGroup, late_streams

MOST_TOKENS = 100
SHAPE = PatchShape(2, TowerShape(1), temporal_patch=2)


def embed(patches: Tensor, sides: Sequence[Side] = ()) -> Tensor:
    """The first values of each patch, in place of a tower's forward."""
    return (patches.float() + 1)[None, :, :3]


TOWER = Tower(embed, SHAPE, 3, 0, torch.float32, CUDA, TowerSizes(3, 3, 0, 1))


@pytest.fixture(params=[False, True], ids=["", "memory is reused"])
def device(request: pytest.FixtureRequest) -> Iterator[LateDevice]:
    with late_streams(request.param) as device:
        yield device


def slices_of(*sizes: tuple[int, int]) -> list[Tensor]:
    random = torch.Generator().manual_seed(len(sizes))
    shapes = [(2, rows * SHAPE.token_px, columns * SHAPE.token_px, 3) for rows, columns in sizes]
    return [torch.randint(0, 250, shape, dtype=torch.uint8, generator=random) for shape in shapes]


def embeds_of(slices: Sequence[Any]) -> Tensor:
    return torch.cat([embed(patchify(frames, SHAPE)) for frames in slices], dim=1)


@torch.inference_mode()
def begin_reading(embeds: Sequence[Tensor]) -> Readback:
    """As items do: on a stream of its own, once the host knows that the embeddings are computed."""
    with beside(CUDA, "prune"):
        return Readback(*[each[:, ::2] + 0 for each in embeds])


def check_read(
    encode: Callable[[Sequence[Tensor]], Sequence[Tensor]], batches: Sequence[Sequence[Tensor]], device: LateDevice
) -> None:
    """What is read of forwards is of their own frames, though all are launched before the first is waited for."""
    launched = [(encode(slices), Computed(CUDA)) for slices in batches]
    assert device.waits == 0
    readings = []
    for embeds, computed in launched:
        computed.wait()
        readings.append(begin_reading(embeds))
    for reading, encoded in zip(readings, batches, strict=True):
        for found, frames in zip(reading.wait(), encoded, strict=True):
            assert torch.equal(found, embeds_of([frames])[:, ::2])


def test_forwards_that_are_launched_before_the_last_is_computed_read_their_own_frames(device: LateDevice) -> None:
    batches = [slices_of((2, 3), (1, 4)), slices_of((2, 3), (1, 4), (5, 1))]
    check_read(TOWER.encode, batches, device)


class LateGraphs:
    """A `Device` whose replays queue what was captured."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device

    def __call__(self, inputs: Sequence[Tensor], compute: Callable[[], Tensor]) -> Captured:
        output = compute()
        return Captured(lambda: output.copy_(compute()), output)

    def measure_s(self, run: Callable[[], object]) -> float:
        run()
        self._device.wait(self._device.current)
        return 1.0


def test_replays_that_are_launched_before_the_last_is_computed_read_their_own_frames_and_layouts(
    device: LateDevice,
) -> None:
    def embed_with_places(patches: Tensor, layout: PackedLayout[Tensor]) -> Tensor:
        return embed(patches) + layout.positions.sum(1)[:, None]

    forward = ModelForward(embed_with_places, TowerShape(1), CUDA, varlen=True)
    tower = with_graphs(replace(TOWER, forward=forward), MOST_TOKENS, LateGraphs(device))
    batches, waited = [slices_of((2, 3), (1, 4)), slices_of((5, 1), (2, 3), (1, 4))], device.waits
    embeds = [each for slices in batches for each in tower.encode(slices)]
    assert device.waits == waited
    reading = Readback(*embeds)
    for found, frames in zip(reading.wait(), batches[0] + batches[1], strict=True):
        _, rows, columns, _ = frames.shape
        places = torch.arange(rows // 2)[:, None] + torch.arange(columns // 2)
        assert torch.equal(found, embeds_of([frames]) + places.flatten()[:, None])


def test_frames_that_arrive_late_on_the_current_stream_are_encoded(device: LateDevice) -> None:
    """Those of a rank, by NCCL: one share after another."""
    shares = [slices_of((2, 3), (1, 4)), slices_of((3, 3)), slices_of((2, 2), (4, 1))]
    group = LateGroup(device, (torch.cat([each.flatten() for each in share]) for share in shares))
    orders, answers = iter([*map(announced, shares), None]), list[bytes]()
    service: Any = SimpleNamespace(receive=lambda: next(orders), answer=answers.append)
    run_shares(service, TOWER, Exchange(group), MOST_TOKENS)
    assert device.waits == 0
    device.wait(group.stream)
    assert answers == [DONE] * 3
    for found, share in zip(group.sent, shares, strict=True):
        assert torch.equal(found, embeds_of(share))


def test_embeddings_that_arrive_late_from_a_rank_are_read(device: LateDevice) -> None:
    batches = [slices_of((2, 3), (1, 4), (3, 3)), slices_of((1, 4), (2, 2), (5, 1), (2, 3))]
    told: list[bytes] = []

    def encoded_by_the_rank() -> Iterator[Tensor]:
        for frames, order in zip(group.sent, told, strict=False):
            yield embeds_of(unpacked(frames, order))

    group = LateGroup(device, encoded_by_the_rank())
    others: Any = SimpleNamespace(send=lambda rank, order: told.append(order), receive=lambda *_: DONE)
    towers = DataParallelTower(TOWER, others, 2, Exchange(group), MOST_TOKENS, RankFailure())
    check_read(towers.encode, batches, device)
    assert len(group.sent) == 2


def test_a_read_does_not_wait_for_later_work(device: LateDevice) -> None:
    values = torch.arange(6.0).to(CUDA, non_blocking=True)
    reading = Readback(values + 1)
    later: Any = values * 2
    assert torch.equal(reading.wait()[0], torch.arange(6.0) + 1)
    assert later.held.isnan().all()


async def test_embeddings_that_a_prompt_brings_are_converted_before_they_are_read(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def here(call: Callable[..., object], *arguments: Any) -> object:
        return call(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", here)
    plan = MediaPlan(Modality.IMAGE, Grid(1, 2, 3), (Run(0, 6),), FrameShape(), None, (), bytes(32))
    batcher: Any = SimpleNamespace(ending_on_device_errors=nullcontext)
    embeds = torch.arange(18.0, dtype=torch.bfloat16).view(1, 6, 3)
    entry = await EmbedsCache(TOWER, batcher, ByteSemaphore(2**20), 0).bring(plan, embeds)
    (found,) = begin_reading([entry.embeds]).wait()
    assert torch.equal(found, embeds[:, ::2].float())
