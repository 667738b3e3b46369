"""The packet index has the times of all frames; files without video or beyond a limit are rejected by name."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from common.contract.errors import MediaRejected
from services.preprocessing.sources.source import bytes_source
from services.preprocessing.video import packets
from services.preprocessing.video.packets import PacketIndex, read_packets
from services.preprocessing.video.sampling import FrameRate
from tests.media import sound
from tests.preprocessing.preprocessing_media import B_FRAMES, clip, shifted


def index_of(data: bytes) -> PacketIndex:
    return read_packets(bytes_source("video", data))


def test_times_of_b_frames_are_sorted_and_start_at_the_first_frame_shown() -> None:
    index = index_of(clip(24, rate=Fraction(24000, 1001), options=B_FRAMES))
    assert [tick * index.times.time_base for tick in index.times.ticks] == [
        Fraction(number * 1001, 24000) for number in range(24)
    ]
    assert index.times.rate() == FrameRate(Fraction(24000, 1001), constant=True)
    assert len(index.keyframes) == 2


def test_times_out_of_range_are_refused() -> None:
    data = clip(8, 25)
    tick_s = index_of(data).times.time_base
    assert index_of(shifted(data, "mp4", tick_s * 2**61)).times == index_of(data).times
    with pytest.raises(MediaRejected, match=rf"^video has a frame at \d+ ticks, all must be within ±{2**62}$"):
        index_of(shifted(data, "mp4", tick_s * 2**62))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"this is no media at all" * 100, "not a readable video"),
        (sound(), "nothing but sound: it has no video stream"),
        (clip(4, container="matroska").replace(b"V_MPEG4/ISO/AVC", b"V_XXXX4/ISO/AVC"), "unsupported codec"),
        (
            clip(3, container="matroska", pts=[0, 40, 10**11], time_base=Fraction(1, 1000)),
            r"claims to last 1000000\d\d s, at most 604800 are allowed",
        ),
    ],
)
def test_a_file_without_usable_video_is_rejected(data: bytes, why: str) -> None:
    with pytest.raises(MediaRejected, match=why):
        index_of(data)


def test_a_playlist_reaches_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.ts").write_bytes(clip(30, container="mpegts"))
    playlists = [
        f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile://{tmp_path}/secret.ts\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile {tmp_path}/secret.ts\n",
        "ffconcat version 1.0\nfile secret.ts\n",
    ]
    for playlist in playlists:
        with pytest.raises(MediaRejected):
            index_of(playlist.encode())


def test_frames_above_the_limit_are_rejected_before_any_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packets, "MAX_FRAME_PX", 48 * 64 - 1)
    with pytest.raises(MediaRejected, match=r"64×48 pixels, at most 3071 are allowed"):
        index_of(clip(4))


class Surprised:
    """Raises IndexError once, as PyAV does at a packet of a stream that the header did not announce."""

    def __init__(self, container: Any) -> None:
        self._container, self._stumbled = container, False

    def demux(self, stream: Any) -> Iterator[Any]:
        for number, packet in enumerate(self._container.demux(stream)):
            yield packet
            if number == 9 and not self._stumbled:
                self._stumbled = True
                raise IndexError("list index out of range")


def test_a_stream_that_begins_in_mid_file_does_not_end_reading() -> None:
    with packets.open_video(bytes_source("video", clip(30))) as (container, stream):
        surprised: Any = Surprised(container)
        assert len(list(packets.packets_of(surprised, stream))) == 30
