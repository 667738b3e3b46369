"""Indexes of media as fields and numbers of a message, and back, checked: a malicious file may have made them up."""

from __future__ import annotations

from array import array
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gridsieve.common.contract.errors import PeerContract
from gridsieve.services.preprocessing.sound.track import SoundIndex
from gridsieve.services.preprocessing.video.completeness import MAX_MISSING
from gridsieve.services.preprocessing.video.epochs import MAX_EPOCHS, Epoch
from gridsieve.services.preprocessing.video.packets import MAX_FRAME_PX, MAX_PACKETS, MAX_PTS, PacketIndex
from gridsieve.services.preprocessing.video.pictures import PictureIndex
from gridsieve.services.preprocessing.video.sampling import MAX_FRAMES, FrameTimes
from gridsieve.services.preprocessing.video.timing import MAX_LENGTH_S
from gridsieve.services.preprocessing.workers.protocol import MAX_INT, Facts

_MAX_RATES = 3
# Two times of a container differ by at most so much, in seconds.
_MAX_START_S = 2 * MAX_PTS


def index_facts(index: PacketIndex) -> tuple[dict[str, Any], NDArray[np.int64]]:
    """A packet index as fields and int64 [pts | sizes | keyframes], or [times by order | keyframes] without pts.

    The receiver derives frame times.
    """
    times = index.times
    shown = times.ticks if index.pts is None else index.pts
    facts = {
        "frames": len(times.ticks),
        "by_order": int(index.pts is None),
        "first_tick": index.first_tick,
        "tail_ticks": times.tail_ticks,
        "time_base": _pairs(times.time_base),
        "rates": _pairs(*times.rates[:_MAX_RATES]),
        "height_px": index.height_px,
        "width_px": index.width_px,
        "orientation": index.orientation,
        "missing_frames": index.missing_frames,
        "dropped_frames": index.dropped_frames,
        "epochs": [part for each in index.epochs for part in (each.first_packet, each.shift, int(each.joined))],
    }
    return facts, np.concatenate([np.asarray(each, np.int64) for each in (shown, index.sizes or (), index.keyframes)])


def index_of(facts: Facts, numbers: NDArray[np.int64]) -> PacketIndex:
    """The inverse of `index_facts`. Raises PeerContract for an index that `read_packets` cannot have made."""
    frames = facts.integer("frames", 1, MAX_PACKETS)
    by_order = facts.integer("by_order", 0, 1)
    pts, sizes, keyframes = np.split(numbers, [frames, frames if by_order else 2 * frames])
    within = -MAX_PTS < numbers.min(initial=0) <= numbers.max(initial=0) < MAX_PTS
    in_order = bool((pts[1:] > pts[:-1]).all() and (keyframes[1:] >= keyframes[:-1]).all())
    sized = by_order or (sizes.size == frames and 0 <= sizes.min() <= sizes.max() < 2**32)
    if pts.size < frames or keyframes.size > MAX_PACKETS or not (within and in_order and sized):
        raise PeerContract("a worker's index is out of order or out of range")
    time_base = _fractions(facts, "time_base", 1)
    if len(time_base) != 1:
        raise PeerContract("a worker's index has no time base")
    times = FrameTimes(
        ticks=array("q", (pts - pts[0]).tobytes()),
        tail_ticks=facts.integer("tail_ticks", 1, MAX_INT),
        time_base=time_base[0],
        rates=_fractions(facts, "rates", _MAX_RATES),
    )
    if times.length_s > MAX_LENGTH_S:
        raise PeerContract("a worker's index is longer than the longest video")
    height, width = _frame_size(facts)
    return PacketIndex(
        times=times,
        pts=None if by_order else array("q", pts.tobytes()),
        keyframes=array("q", keyframes.tobytes()),
        height_px=height,
        width_px=width,
        orientation=facts.integer("orientation", 1, 8),
        missing_frames=facts.integer("missing_frames", 0, MAX_MISSING),
        dropped_frames=facts.integer("dropped_frames", 0, MAX_PACKETS),
        epochs=_epochs(facts),
        sizes=None if by_order else array("I", sizes.astype(np.uint32).tobytes()),
        first_tick=facts.integer("first_tick", -MAX_PTS, MAX_PTS),
    )


def picture_index_facts(index: PictureIndex) -> dict[str, Any]:
    """An index of pictures as fields, without the ends of the pictures."""
    return {
        "height_px": index.height_px,
        "width_px": index.width_px,
        "orientations": list(index.orientations),
        "moves": int(index.moves),
    }


def picture_index_of(facts: Facts, ends: tuple[int, ...]) -> PictureIndex:
    """The inverse of `picture_index_facts`. Raises PeerContract for an index that `read_pictures` cannot have made."""
    orientations = facts.integers("orientations", MAX_FRAMES, 1, 8)
    if len(orientations) != max(1, len(ends)):
        raise PeerContract("a worker's index has another number of pictures than the request")
    return PictureIndex(ends, orientations, *_frame_size(facts), moves=bool(facts.integer("moves", 0, 1)))


def sound_index_facts(index: SoundIndex | None) -> dict[str, Any]:
    """An index of a sound track as fields; none for a file without sound."""
    if index is None:
        return {}
    return {"start_s": _pairs(index.start_s), "duration_s": _pairs(index.duration_s)}


def sound_index_of(facts: Facts) -> SoundIndex | None:
    """The inverse of `sound_index_facts`. Raises PeerContract for an index that `read_sound` cannot have made."""
    if "start_s" not in facts.values:
        return None
    start_s, duration_s = (signed_fraction(facts, name) for name in ("start_s", "duration_s"))
    if abs(start_s) > _MAX_START_S or not 0 <= duration_s <= MAX_LENGTH_S:
        raise PeerContract("a worker's index of a sound begins or ends where none does")
    return SoundIndex(start_s, duration_s)


def signed_fraction(facts: Facts, name: str) -> Fraction:
    """A fraction of any sign, sent as a pair of integers."""
    parts = facts.integers(name, 2, -MAX_INT, MAX_INT)
    if len(parts) != 2 or parts[1] < 1:
        raise PeerContract(f"a worker's {name} must be a fraction")
    return Fraction(*parts)


def _epochs(facts: Facts) -> tuple[Epoch, ...]:
    parts = facts.integers("epochs", 3 * MAX_EPOCHS, -MAX_INT, MAX_INT)
    if len(parts) % 3 or not parts:
        raise PeerContract("a worker's epochs must be triples of integers")
    epochs = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return tuple(Epoch(first_packet, shift, bool(joined)) for first_packet, shift, joined in epochs)


def _frame_size(facts: Facts) -> tuple[int, int]:
    height = facts.integer("height_px", 1, MAX_FRAME_PX)
    return height, facts.integer("width_px", 1, MAX_FRAME_PX // height)


def _pairs(*fractions: Fraction) -> list[int]:
    return [part for each in fractions for part in (each.numerator, each.denominator)]


def _fractions(facts: Facts, name: str, max_count: int) -> tuple[Fraction, ...]:
    """Fractions above 0, sent as pairs of integers: parsing text could build a number with a billion digits."""
    parts = facts.integers(name, 2 * max_count, 1, MAX_INT)
    if len(parts) % 2:
        raise PeerContract(f"a worker's {name} must be pairs of integers")
    return tuple(Fraction(*parts[at : at + 2]) for at in range(0, len(parts), 2))
