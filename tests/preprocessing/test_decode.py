"""The decoder yields the selected frames, seeks as little as possible, and repairs or refuses damage."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import av
import pytest

from common.contract.errors import MediaDamaged
from services.preprocessing.sources.source import Source, bytes_source
from services.preprocessing.video import decode
from services.preprocessing.video.decode import DecodedFrame, decode_frames
from services.preprocessing.video.packets import PacketIndex, read_packets
from services.preprocessing.video.slices import PlannedVideo
from tests.preprocessing.preprocessing_media import clip, number_of, shifted, without_packets

# Three B-frames in a row, a keyframe every 12 frames.
B_FRAMES = {"g": "12", "bf": "3", "x264-params": "b-adapt=0:scenecut=0"}


def opened(data: bytes) -> tuple[Source, PacketIndex]:
    source = bytes_source("video", data)
    return source, read_packets(source)


def frames_at(data: bytes, places: list[int]) -> list[DecodedFrame]:
    return list(decode_frames(*opened(data), places))


def numbers(frames: list[DecodedFrame]) -> list[int]:
    return [number_of(frame.pixels) for frame in frames]


def test_frames_of_a_variable_rate_keep_their_times() -> None:
    pts = [0, 40, 80, 500, 540, 1000, 1033, 1066]
    data = clip(8, container="matroska", pts=pts, time_base=Fraction(1, 1000))
    source, index = opened(data)
    assert list(index.times.ticks) == pts
    assert not index.times.rate().constant
    assert numbers(list(decode_frames(source, index, [0, 3, 5, 7]))) == [0, 3, 5, 7]


@pytest.mark.parametrize("container", ["mp4", "mov", "matroska", "mpegts", "flv"])
@pytest.mark.parametrize("start_s", [Fraction(1, 5), 1200])
def test_a_video_that_starts_late_is_the_same_video(container: str, start_s: Fraction) -> None:
    data = shifted(clip(40, 25, options=B_FRAMES), container, Fraction(start_s))
    source, index = opened(data)
    assert [tick * index.times.time_base for tick in index.times.ticks] == [Fraction(n, 25) for n in range(40)]
    assert index.pts is not None
    assert index.pts[0] * index.times.time_base == start_s
    assert numbers(list(decode_frames(source, index, [0, 11, 30, 39]))) == [0, 11, 30, 39]


def test_negative_times_are_accepted() -> None:
    source, index = opened(shifted(clip(40, 25, options=B_FRAMES), "mpegts", Fraction(-1, 5)))
    assert index.pts is not None
    assert index.pts[0] < 0
    assert numbers(list(decode_frames(source, index, range(40)))) == list(range(40))


@pytest.mark.parametrize("container", ["mp4", "mov"])
@pytest.mark.parametrize("hidden", [5, 17])
def test_frames_that_an_edit_list_hides_are_ignored(container: str, hidden: int) -> None:
    data = shifted(clip(40, 25, options=B_FRAMES), container, Fraction(-hidden, 25))
    source, index = opened(data)
    assert [tick * index.times.time_base for tick in index.times.ticks] == [Fraction(n, 25) for n in range(40 - hidden)]
    assert numbers(list(decode_frames(source, index, range(40 - hidden)))) == list(range(hidden, 40))
    assert numbers(list(decode_frames(source, index, [1, 39 - hidden]))) == [hidden + 1, 39]


@pytest.mark.parametrize(("container", "codec"), [("h264", "libx264"), ("mpegts", "libx264"), ("mpegts", "mpeg2video")])
def test_frames_that_change_size_in_mid_stream_are_resized(container: str, codec: str) -> None:
    options = {"g": "10", "bf": "0"}
    data = clip(20, container=container, codec=codec, options=options, rate=25)
    data += clip(20, container=container, codec=codec, options=options, rate=25, size=(96, 128))
    source, index = opened(data)
    places = (0, 8, len(index.times.ticks) - 9, len(index.times.ticks) - 1)
    sizes = {frame.pixels.shape for frame in decode_frames(source, index, places)}
    assert sizes == {(48, 64, 3), (96, 128, 3)}
    slices = list(PlannedVideo(source, index, places, 2, 56, 84).slices())
    assert [each.pixels.shape for each in slices] == [(2, 56, 84, 3), (2, 56, 84, 3)]


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_cut_decodes_only_from_the_keyframe_before_it(container: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, index = opened(clip(250, 25, container=container, options={"g": "25", "bf": "2"}))
    cut = index.times.cut(4.2, 5.8)
    first = index.times.ticks.index(cut.ticks[0])
    assert (first, len(cut.ticks)) == (105, 40)
    sent: set[Fraction] = set()
    original = decode.packets_of

    def watched(container: Any, stream: Any) -> Iterator[Any]:
        for packet in original(container, stream):
            sent.add(packet.pts * packet.time_base)
            yield packet

    monkeypatch.setattr(decode, "packets_of", watched)
    places = range(first, first + len(cut.ticks), 4)
    assert numbers(list(decode_frames(source, index, places))) == list(places)
    # Reordering and threads hold back a few frames.
    assert {time for time in sent if time} <= {Fraction(frame, 25) for frame in range(100, 155)}


@pytest.fixture
def seeks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every keyframe that is sought."""
    sought: list[int] = []
    original = decode._Frames._seek

    def seek(self: decode._Frames, keyframe: int) -> None:
        sought.append(keyframe)
        original(self, keyframe)

    monkeypatch.setattr(decode._Frames, "_seek", seek)
    return sought


@pytest.mark.parametrize(("places", "expected"), [([0, 3, 11], 0), ([0, 13, 14, 23], 1), ([30], 1), ([0, 59], 1)])
def test_it_seeks_only_if_a_later_keyframe_precedes_the_next_frame(
    seeks: list[int], places: list[int], expected: int
) -> None:
    assert numbers(frames_at(clip(60, options={"g": "12", "bf": "0"}), places)) == places
    assert len(seeks) == expected


class Misled:
    """A container whose index leads past the keyframe that was sought."""

    def __init__(self, container: Any, lands_at: int) -> None:
        self._container, self._lands_at = container, lands_at

    def seek(self, pts: int, stream: Any) -> None:
        self._container.seek(self._lands_at, stream=stream)

    def demux(self, stream: Any) -> Any:
        return self._container.demux(stream)


def test_a_seek_that_lands_too_late_restarts_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    source, index = opened(clip(60, options={"g": "12", "bf": "0"}))
    original = decode.open_video

    @contextmanager
    def misled(source: Source) -> Iterator[tuple[Misled, Any]]:
        with original(source) as (container, stream):
            yield Misled(container, index.keyframes[4]), stream

    monkeypatch.setattr(decode, "open_video", misled)
    frames = list(decode_frames(source, index, [0, 25, 38, 50]))
    assert numbers(frames) == [0, 25, 38, 50]
    assert not any(frame.repaired for frame in frames)


def test_an_undecodable_frame_repeats_the_one_before_and_is_counted() -> None:
    data = without_packets(clip(60, container="matroska", codec="mjpeg"), [20])
    places = list(range(0, 60, 2))
    frames = frames_at(data, places)
    assert numbers(frames) == [18 if place == 20 else place for place in places]
    assert [frame.repaired for frame in frames] == [place == 20 for place in places]


def test_an_undecodable_first_frame_repeats_the_first_decodable_one() -> None:
    data = without_packets(clip(60, container="matroska", codec="mjpeg"), [0])
    frames = frames_at(data, list(range(20)))
    assert numbers(frames)[:3] == [1, 1, 2]
    assert [frame.repaired for frame in frames][:3] == [True, False, False]


def test_a_repaired_frame_that_is_sent_twice_counts_twice() -> None:
    data = without_packets(clip(60, container="matroska", codec="mjpeg"), [39])
    frames = frames_at(data, [*range(0, 39, 2), 39, 39])
    assert [frame.repaired for frame in frames] == [*[False] * 20, True, True]


def test_more_than_a_tenth_of_undecodable_frames_is_damaged_media() -> None:
    data = without_packets(clip(60, container="matroska", codec="mjpeg"), [20, 22, 24])
    places = list(range(0, 60, 3))  # 20 frames, of which one is damaged
    assert sum(frame.repaired for frame in frames_at(data, places)) == 1
    with pytest.raises(MediaDamaged, match="2 of its 15 frames cannot be decoded, at most a tenth may be"):
        frames_at(data, list(range(18, 48, 2)))


def test_media_without_any_decodable_frame_are_damaged() -> None:
    data = without_packets(clip(8, container="matroska", codec="mjpeg"), range(8))
    with pytest.raises(MediaDamaged):
        frames_at(data, list(range(8)))


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_truncated_file_has_the_frames_that_are_left_whatever_its_header_says(container: str) -> None:
    options = {"movflags": "faststart"} if container == "mp4" else {}
    whole = clip(60, container=container, options={"g": "12", "bf": "0"}, container_options=options)
    with av.open(io.BytesIO(whole)) as file:
        sizes = [packet.size for packet in file.demux(video=0)]
    data = whole[: len(whole) - sum(sizes[30:])]
    source, index = opened(data)
    frames = len(index.times.ticks)
    assert 20 < frames < 45
    if container == "mp4":
        with av.open(io.BytesIO(data)) as file:
            assert file.streams.video[0].frames == 60
    places = list(range(0, frames - 1, 2))
    assert numbers(list(decode_frames(source, index, places))) == places


def test_a_single_frame_is_a_video() -> None:
    source, index = opened(clip(1))
    assert list(index.times.ticks) == [0]
    assert numbers(list(decode_frames(source, index, [0, 0]))) == [0, 0]
