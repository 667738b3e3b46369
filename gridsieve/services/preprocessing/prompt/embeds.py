"""Embeddings that a prompt brings instead of media: their grid and time base, checked.

The encoder checks their values. It knows neither protobuf nor families.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import DIGEST_BYTES, Grid, Modality
from gridsieve.services.preprocessing.video.timing import MAX_LENGTH_S, TimeBase


@dataclass(frozen=True, slots=True)
class Embeds:
    """Embeddings of one media item. A video has exactly one of the two time bases, an image has none.

    size_bytes: of the tensor, 0 if it was left out. digest: sha256 of the tensor.
    seconds_per_grid: from each temporal slice to the next. timestamps_s: start of each slice. tile_columns: of the
        slices of an image; 0 without.
    Raises InvalidRequest for a time base that is missing, out of range or of the other modality, and for tile_columns
    of a video.
    """

    modality: Modality
    grid: Grid
    size_bytes: int
    digest: bytes
    seconds_per_grid: Fraction | None
    timestamps_s: tuple[float, ...]
    tile_columns: int = 0

    def __post_init__(self) -> None:
        if len(self.digest) != DIGEST_BYTES:
            raise InvalidRequest(f"must have {DIGEST_BYTES} bytes, got {len(self.digest)}", field="embeds.digest")
        given = (self.seconds_per_grid is not None) + bool(self.timestamps_s)
        step = "embeds.seconds_per_grid"
        if self.modality is Modality.IMAGE:
            if self.grid.t != 1:
                raise InvalidRequest(f"of an image must be 1, got {self.grid.t}", field="embeds.grid.t")
            if given:
                text = "and timestamps_s are for videos, an image has no time base"
                raise InvalidRequest(text, field=step)
            return
        if self.tile_columns:
            raise InvalidRequest(f"is for images, got {self.tile_columns} for a video", field="embeds.tile_columns")
        if not given:
            raise InvalidRequest("or timestamps_s must be set: a video needs a time base", field=step)
        if given == 2:
            raise InvalidRequest("and timestamps_s are two time bases, only one may be set", field=step)
        if self.seconds_per_grid is not None:
            _check_step(self.seconds_per_grid, self.grid.t)
        else:
            _check_times(self.timestamps_s, self.grid.t)

    def time_base(self, slice_frames: int, *, of_first: bool = False) -> TimeBase | None:
        """The time base of a video; None for an image. slice_frames, of_first: see `TimeBase.of_frames`."""
        if self.seconds_per_grid is not None:
            return TimeBase.of_step(self.seconds_per_grid, self.grid.t, slice_frames, of_first=of_first)
        return TimeBase.of_slices(self.timestamps_s) if self.timestamps_s else None


def _check_step(seconds: Fraction, slices: int) -> None:
    if seconds <= 0:
        raise InvalidRequest(field="embeds.seconds_per_grid", limit="above 0", value=seconds)
    if seconds * slices > MAX_LENGTH_S:
        text = f"makes the video last {float(seconds * slices):.0f} s, at most {MAX_LENGTH_S} are allowed"
        raise InvalidRequest(text, field="embeds.seconds_per_grid", value=seconds, limit=MAX_LENGTH_S)


def _check_times(times_s: tuple[float, ...], slices: int) -> None:
    if len(times_s) != slices:
        text = f"must hold one time for each of {slices} slices, got {len(times_s)}"
        raise InvalidRequest(text, field="embeds.timestamps_s")
    for place, time in enumerate(times_s):
        name = f"embeds.timestamps_s[{place}]"
        if not (math.isfinite(time) and 0 <= time <= MAX_LENGTH_S):
            raise InvalidRequest(field=name, limit=f"between 0 and {MAX_LENGTH_S}", value=time)
        if place and time < times_s[place - 1]:
            raise InvalidRequest(f"must not be below the one before, {times_s[place - 1]}, got {time}", field=name)
