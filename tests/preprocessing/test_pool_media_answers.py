"""What workers say of media is checked: whatever cannot be true breaks the contract."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from common.contract.errors import PeerContract
from services.preprocessing.sources.source import bytes_source
from services.preprocessing.video.packets import MAX_FRAME_PX, MAX_PACKETS, read_packets
from services.preprocessing.video.resize import UInt8Array
from services.preprocessing.workers.jobs import VideoSlices, index_facts, index_of
from services.preprocessing.workers.protocol import Facts
from tests.preprocessing.pool_media import planned
from tests.preprocessing.preprocessing_media import HEIGHT_PX, WIDTH_PX, clip


@pytest.mark.parametrize(
    "wrong",
    [
        {"frames": 0},
        {"frames": MAX_PACKETS + 1},
        {"frames": 59},
        {"frames": True},
        {"frames": 60.0},
        {"stored_pts": 59},
        {"tail_ticks": 0},
        {"time_base": []},
        {"time_base": [1, 0]},
        {"time_base": [1, 30, 1, 30]},
        {"time_base": ["1", "30"]},
        {"time_base": [2**63, 1]},
        {"time_base": [10**6, 1]},
        {"rates": [30]},
        {"rates": [30, 1] * 4},
        {"rates": "30"},
        {"height_px": 0},
        {"height_px": MAX_FRAME_PX, "width_px": 2},
        {"width_px": None},
    ],
)
def test_an_index_that_cannot_be_true_breaks_the_contract(wrong: dict[str, Any]) -> None:
    index = read_packets(bytes_source("video", clip(60)))
    facts, numbers = index_facts(index)
    assert index_of(Facts(facts), numbers) == index
    with pytest.raises(PeerContract):
        index_of(Facts(facts | wrong), numbers)


def test_the_index_of_a_long_video_takes_no_python_object_for_each_frame() -> None:
    frames = 2**17
    facts, few = index_facts(read_packets(bytes_source("video", clip(60))))
    facts |= {"frames": frames, "stored_pts": frames, "time_base": [1, 1000]}
    numbers = np.concatenate([np.arange(frames, dtype=np.int64), few[60:]])
    tracemalloc.start()
    try:
        again = index_facts(index_of(Facts(facts), numbers))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert again[0] == facts
    assert (again[1] == numbers).all()
    assert peak_bytes < 6 * numbers.nbytes


@pytest.mark.parametrize("place", [5, 61])
@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1])
def test_an_index_out_of_order_breaks_the_contract(place: int, value: int) -> None:
    index = read_packets(bytes_source("video", clip(60, options={"g": "20"})))
    assert list(index.keyframes) == [0, 10240, 20480]
    facts, numbers = index_facts(index)
    numbers[place] = value
    with pytest.raises(PeerContract):
        index_of(Facts(facts), numbers)


@pytest.mark.parametrize(
    "wrong", [{"repaired_frames": 3}, {"repaired_frames": -1}, {"decode_s": float("nan")}, {"resize_s": -1.0}]
)
def test_a_slice_that_cannot_be_true_breaks_the_contract(wrong: dict[str, Any]) -> None:
    job = VideoSlices(planned(bytes_source("video", b"media"), read_packets(bytes_source("video", clip(4))), (0, 1)))
    facts = {"repaired_frames": 0, "decode_s": 0.5, "resize_s": 0.25, "decoded_ns": 5, "resized_ns": 7}
    pixels: UInt8Array = np.zeros(2 * HEIGHT_PX * WIDTH_PX * 3, np.uint8)
    assert job.piece(0, Facts(facts), pixels).pixels.shape == (2, HEIGHT_PX, WIDTH_PX, 3)
    with pytest.raises(PeerContract):
        job.piece(0, Facts(facts | wrong), pixels)
    with pytest.raises(PeerContract):
        job.piece(0, Facts(facts), pixels[1:])
