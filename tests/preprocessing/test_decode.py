"""The packet index has the times of all frames, the decoder yields the selected ones, and both refuse bad files.

How little is read and decoded: test_long_videos.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.stream import Disposition
from av.video.stream import VideoStream
from numpy.typing import NDArray

from gridsieve.common.contract.errors import MediaDamaged, MediaRejected
from gridsieve.services.preprocessing.sources.source import Source, bytes_source
from gridsieve.services.preprocessing.video import decode, packets
from gridsieve.services.preprocessing.video.decode import DecodedFrame, decode_frames
from gridsieve.services.preprocessing.video.packets import PacketIndex, read_packets
from gridsieve.services.preprocessing.video.slices import PlannedVideo
from tests.preprocessing.preprocessing_media import (
    B_FRAMES,
    clip,
    decoded_in_order,
    number_of,
    shifted,
    sound,
    without_packets,
)


def opened(data: bytes) -> tuple[Source, PacketIndex]:
    source = bytes_source("video", data)
    return source, read_packets(source)


def frames_at(data: bytes, places: list[int]) -> list[DecodedFrame]:
    return list(decode_frames(*opened(data), places))


def numbers(frames: list[DecodedFrame]) -> list[int]:
    return [number_of(frame.pixels) for frame in frames]


@pytest.mark.parametrize(
    ("container", "start_s"),
    [
        ("mp4", Fraction(1, 5)),
        ("matroska", Fraction(1200)),
        ("mpegts", Fraction(1200)),
        ("mpegts", Fraction(-1, 5)),
        ("flv", Fraction(1, 5)),
    ],
)
def test_a_video_that_starts_late_or_early_is_the_same_video(container: str, start_s: Fraction) -> None:
    source, index = opened(shifted(clip(40, 25, options=B_FRAMES), container, start_s))
    assert [tick * index.times.time_base for tick in index.times.ticks] == [Fraction(n, 25) for n in range(40)]
    assert index.pts is not None
    assert index.pts[0] * index.times.time_base == start_s
    assert numbers(list(decode_frames(source, index, [0, 11, 30, 39]))) == [0, 11, 30, 39]


@pytest.mark.parametrize("hidden", [5, 17])
def test_frames_that_an_edit_list_hides_are_ignored(hidden: int) -> None:
    source, index = opened(shifted(clip(40, 25, options=B_FRAMES), "mp4", Fraction(-hidden, 25)))
    assert [tick * index.times.time_base for tick in index.times.ticks] == [Fraction(n, 25) for n in range(40 - hidden)]
    assert numbers(list(decode_frames(source, index, range(40 - hidden)))) == list(range(hidden, 40))
    assert numbers(list(decode_frames(source, index, [1, 39 - hidden]))) == [hidden + 1, 39]


@pytest.mark.parametrize(("container", "codec"), [("h264", "libx264"), ("mpegts", "mpeg2video")])
def test_frames_that_change_size_in_mid_stream_are_resized(container: str, codec: str) -> None:
    small, large = (clip(20, 25, container, codec, {"g": "10", "bf": "0"}, size=size) for size in ((48, 64), (96, 128)))
    source, index = opened(small + large)
    places = (0, 8, len(index.times.ticks) - 9, len(index.times.ticks) - 1)
    sizes = {frame.pixels.shape for frame in decode_frames(source, index, places)}
    assert sizes == {(48, 64, 3), (96, 128, 3)}
    slices = list(PlannedVideo(source, index, places, 2, (56, 84)).slices())
    assert [each.pixels.shape for each in slices] == [(2, 56, 84, 3), (2, 56, 84, 3)]


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
    def misled(*opened: Any) -> Iterator[tuple[Misled, Any]]:
        with original(*opened) as (container, stream):
            yield Misled(container, index.keyframes[4]), stream

    monkeypatch.setattr(decode, "open_video", misled)
    frames = list(decode_frames(source, index, [0, 25, 38, 50]))
    assert numbers(frames) == [0, 25, 38, 50]
    assert not any(frame.repaired for frame in frames)


@pytest.mark.parametrize(
    ("damaged", "places", "shown"),
    [
        (20, [*range(0, 60, 2)], [*range(0, 20, 2), 18, *range(22, 60, 2)]),  # repeats the frame before
        (0, [*range(20)], [1, *range(1, 20)]),  # repeats the first that can be decoded
        (39, [*range(0, 39, 2), 39, 39], [*range(0, 39, 2), 38, 38]),  # counts as often as it is sent
    ],
)
def test_an_undecodable_frame_repeats_another_and_is_counted(damaged: int, places: list[int], shown: list[int]) -> None:
    frames = frames_at(without_packets(clip(60, container="matroska", codec="mjpeg"), [damaged]), places)
    assert numbers(frames) == shown
    assert [frame.repaired for frame in frames] == [place == damaged for place in places]


def test_more_than_a_tenth_of_undecodable_frames_is_damaged_media() -> None:
    data = without_packets(clip(60, container="matroska", codec="mjpeg"), [20, 22, 24])
    places = list(range(0, 60, 3))  # 20 frames, of which one is damaged
    assert sum(frame.repaired for frame in frames_at(data, places)) == 1
    with pytest.raises(MediaDamaged, match="2 of its 15 frames cannot be decoded, at most a tenth may be"):
        frames_at(data, list(range(18, 48, 2)))


def test_media_without_any_decodable_frame_are_damaged() -> None:
    with pytest.raises(MediaDamaged):
        frames_at(without_packets(clip(8, container="matroska", codec="mjpeg"), range(8)), list(range(8)))


def test_a_truncated_file_has_the_frames_that_are_left_whatever_its_header_says() -> None:
    whole = clip(60, options={"g": "12", "bf": "0"}, container_options={"movflags": "faststart"})
    with av.open(io.BytesIO(whole)) as file:
        sizes = [packet.size for packet in file.demux(video=0)]
        assert file.streams.video[0].frames == 60
    source, index = opened(whole[: len(whole) - sum(sizes[30:])])
    frames = len(index.times.ticks)
    assert 20 < frames < 45
    places = list(range(0, frames - 1, 2))
    assert numbers(list(decode_frames(source, index, places))) == places


def test_times_out_of_range_are_refused() -> None:
    data = clip(8, 25)
    tick_s = opened(data)[1].times.time_base
    assert opened(shifted(data, "mp4", tick_s * 2**61))[1].times == opened(data)[1].times
    with pytest.raises(MediaRejected, match=rf"^video has a frame at \d+ ticks, all must be within ±{2**62}$"):
        opened(shifted(data, "mp4", tick_s * 2**62))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"this is no media at all" * 100, "cannot be read as an image or a video"),
        (sound(), "has no video stream, only audio"),
        (clip(4, container="matroska").replace(b"V_MPEG4/ISO/AVC", b"V_XXXX4/ISO/AVC"), "unsupported codec"),
        (
            clip(3, container="matroska", pts=[0, 40, 10**11], time_base=Fraction(1, 1000)),
            r"claims to last 1000000\d\d s, at most 604800 are allowed",
        ),
    ],
)
def test_a_file_without_usable_video_is_rejected(data: bytes, why: str) -> None:
    with pytest.raises(MediaRejected, match=why):
        opened(data)


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
            opened(playlist.encode())


def test_frames_above_the_limit_are_rejected_before_any_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packets, "MAX_FRAME_PX", 48 * 64 - 1)
    with pytest.raises(MediaRejected, match=r"64×48 pixels, at most 3071 are allowed"):
        opened(clip(4))


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


# --- display matrices ----------------------------------------------------------------------------------------------

# a, b, c, d of the matrices of EXIF's eight orientations, in units of 2^-16.
MATRICES = {
    1: (1, 0, 0, 1), 2: (-1, 0, 0, 1), 3: (-1, 0, 0, -1), 4: (1, 0, 0, -1),
    5: (0, 1, 1, 0), 6: (0, 1, -1, 0), 7: (0, -1, -1, 0), 8: (0, -1, 1, 0),
}  # fmt: skip


def turned_clip(orientation: int, container: str = "mp4", **options: str) -> bytes:
    a, b, c, d = (each << 16 for each in MATRICES[orientation])

    def prepare(stream: Any) -> None:
        stream.set_display_matrix([a, b, 0, c, d, 0, 0, 0, 1 << 30])

    return clip(24, container=container, options={"g": "8"}, container_options=options, prepare=prepare)


def shown(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Each pixel (x, y) at (a·x + c·y, b·x + d·y), moved back into view."""
    a, b, c, d = MATRICES[orientation]
    y, x = np.mgrid[: pixels.shape[0], : pixels.shape[1]]
    columns, rows = a * x + c * y, b * x + d * y
    columns, rows = columns - columns.min(), rows - rows.min()
    picture = np.zeros((rows.max() + 1, columns.max() + 1, 3), np.uint8)
    picture[rows, columns] = pixels
    return picture


@pytest.mark.parametrize(
    ("container", "orientation"), [*(("mp4", each) for each in MATRICES), ("matroska", 4), ("matroska", 8)]
)
def test_frames_are_turned_as_the_container_says(container: str, orientation: int) -> None:
    data = turned_clip(orientation, container)
    whole = decoded_in_order(data)
    source, index = opened(data)
    assert index.orientation == orientation
    assert (index.height_px, index.width_px) == ((64, 48) if orientation >= 5 else (48, 64))
    for frame, place in zip(decode_frames(source, index, [0, 5, 17]), [0, 5, 17], strict=True):
        assert np.array_equal(frame.pixels, shown(whole[place], orientation))


def test_the_matrix_is_found_wherever_the_container_keeps_it() -> None:
    behind = turned_clip(6)
    assert behind.index(b"mdat") < behind.index(b"moov")
    in_front = turned_clip(6, movflags="faststart")
    assert in_front.index(b"moov") < in_front.index(b"mdat")
    # The muxer leaves eight bytes before `mdat` free for a 64-bit length.
    free = behind.index(b"free") - 4
    size = int.from_bytes(behind[free + 8 : free + 12]) + 8
    long = behind[:free] + (1).to_bytes(4) + b"mdat" + size.to_bytes(8) + behind[free + 16 :]
    assert [opened(data)[1].orientation for data in (behind, in_front, long)] == [6, 6, 6]


# --- containers without presentation times ---------------------------------------------------------------------------

PYRAMIDS = {"g": "30", "bf": "7", "x264-params": "b-pyramid=normal:b-adapt=0:scenecut=0"}
# Still from 2 s to 6 s. Packets that are held back while the picture is still have the times after it.
PAUSED = (*range(20), *range(60, 100))


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("avi", "libx264", PYRAMIDS),
        ("avi", "mpeg4", {"bf": "2"}),
        ("asf", "libx264", PYRAMIDS),
        ("asf", "libx264", B_FRAMES),
    ],
)
def test_containers_of_decoding_times_show_each_frame_at_its_own(
    container: str, codec: str, options: dict[str, str]
) -> None:
    data = clip(60, 10, container, codec, options, PAUSED, Fraction(1, 10))
    source, index = opened(data)
    assert [tick * index.times.time_base * 10 for tick in index.times.ticks] == list(PAUSED)
    assert (index.missing_frames, index.dropped_frames) == (0, 0)
    for step in (1, 7):
        frames = list(decode_frames(source, index, range(0, 60, step)))
        assert numbers(frames) == list(range(0, 60, step))
        assert not any(frame.repaired for frame in frames)


def test_an_avi_whose_header_counts_pauses_is_whole_unless_it_is_cut() -> None:
    """Between two frames lies a pause of one, as in a copy of an MP4 whose frames may be of half the length."""
    whole = clip(60, 20, "avi", options=B_FRAMES, pts=range(0, 120, 2), time_base=Fraction(1, 20))
    index = opened(whole)[1]
    assert (index.missing_frames, index.times.rate().per_s) == (0, 10)
    cut = opened(whole[: len(whole) * 3 // 4])[1]
    assert len(cut.times.ticks) < 50
    assert abs(cut.missing_frames + len(cut.times.ticks) - 60) <= 1


RAW_HEVC = {"x265-params": "log-level=none:bframes=3:frame-threads=1:pools=none"}


@pytest.mark.parametrize(
    ("container", "codec", "options", "rate"),
    [
        ("h264", "libx264", B_FRAMES, Fraction(30000, 1001)),
        ("hevc", "libx265", RAW_HEVC, 50),
    ],
)
def test_a_raw_stream_has_the_rate_that_it_declares(
    container: str, codec: str, options: dict[str, str], rate: Fraction | int
) -> None:
    source, index = opened(clip(30, rate, container, codec, options))
    assert index.times.rate().per_s == rate
    assert float(index.times.length_s) == pytest.approx(30 / rate)
    assert numbers(list(decode_frames(source, index, range(30)))) == list(range(30))


# --- several tracks --------------------------------------------------------------------------------------------------


def with_track(film: bytes, container: str, frames: int, dispositions: tuple[Disposition, Disposition]) -> bytes:
    """The film behind a track of MJPEG, whose frames are larger. dispositions: of that track, and of the film's."""
    with tempfile.NamedTemporaryFile() as file:
        with av.open(io.BytesIO(film)) as original, av.open(file.name, "w", format=container) as output:
            other = output.add_stream("mjpeg", rate=10)
            assert isinstance(other, VideoStream)
            other.width, other.height, other.pix_fmt = 128, 96, "yuvj420p"
            stream = output.add_stream_from_template(original.streams.video[0])
            other.disposition, stream.disposition = dispositions
            picture = av.VideoFrame.from_ndarray(np.full((96, 128, 3), 99, np.uint8), format="rgb24")
            for number in range(frames):
                picture.pts, picture.time_base = number, Fraction(1, 10)
                output.mux(other.encode(picture))
            output.mux(other.encode())
            for packet in original.demux(video=0):
                if packet.size:
                    packet.stream = stream
                    output.mux(packet)
        return Path(file.name).read_bytes()


NONE, DEFAULT = Disposition(0), Disposition.default


@pytest.mark.parametrize(
    ("container", "frames", "dispositions", "shows_film"),
    [
        ("matroska", 1, (NONE, DEFAULT), True),  # a cover, as a track
        ("matroska", 1, (DEFAULT, DEFAULT), True),
        ("matroska", 1, (NONE, NONE), True),
        ("matroska", 5, (NONE, DEFAULT), True),
        ("mp4", 5, (NONE, DEFAULT), True),
        ("mp4", 1, (DEFAULT, DEFAULT), True),
        ("mp4", 1, (DEFAULT | Disposition.attached_pic, NONE), True),
        ("matroska", 5, (DEFAULT, NONE), False),
        ("matroska", 5, (DEFAULT, DEFAULT), False),  # the larger one
    ],
)
def test_the_default_track_is_shown_and_a_cover_never(
    container: str, frames: int, dispositions: tuple[Disposition, Disposition], shows_film: bool
) -> None:
    source, index = opened(with_track(clip(20, 10), container, frames, dispositions))
    assert (index.height_px, index.width_px) == ((48, 64) if shows_film else (96, 128))
    if shows_film:
        assert numbers(list(decode_frames(source, index, range(20)))) == list(range(20))
