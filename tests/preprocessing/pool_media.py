"""What tests ask of worker processes that read and decode real media."""

from __future__ import annotations

from services.preprocessing.sources.source import Source
from services.preprocessing.video.packets import PacketIndex
from services.preprocessing.video.slices import PlannedVideo, Slice
from services.preprocessing.workers.limits import Limits
from tests.preprocessing.pool_asks import MIB
from tests.preprocessing.preprocessing_media import HEIGHT_PX, WIDTH_PX, number_of

LIMITS = Limits(wall_s=20, memory_bytes=1024 * MIB, file_bytes=16 * MIB, frames=10_000, length_s=10_000, pixels=2**40)


def planned(source: Source, index: PacketIndex, places: tuple[int, ...]) -> PlannedVideo:
    return PlannedVideo(source, index, places, 2, HEIGHT_PX, WIDTH_PX)


def numbers_of(slices: list[Slice]) -> list[int]:
    return [number_of(row) for each in slices for row in each.pixels]
