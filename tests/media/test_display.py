"""Frames are what a player shows: pixel aspect, fields, high dynamic range, ranges and transparency."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.video.reformatter import ColorPrimaries, ColorRange, ColorTrc
from av.video.stream import VideoStream
from numpy.typing import NDArray
from PIL import Image

from gridsieve.common.contract.errors import MediaRejected
from gridsieve.services.preprocessing.sources.source import bytes_source
from gridsieve.services.preprocessing.video.decode import decode_frames
from gridsieve.services.preprocessing.video.packets import read_packets
from gridsieve.services.preprocessing.video.pictures import read_picture
from tests.preprocessing.preprocessing_media import clip

ROWS, COLUMNS = 64, 128
BT2020_NCL = 9


def shown(data: bytes) -> NDArray[np.uint8]:
    """The first frame."""
    source = bytes_source("video", data)
    return next(decode_frames(source, read_packets(source), [0])).pixels


def encoded(
    frames: Sequence[av.VideoFrame], container: str, codec: str, prepare: Callable[[VideoStream], None], **options: str
) -> bytes:
    with tempfile.NamedTemporaryFile() as file:
        with av.open(file.name, "w", format=container) as output:
            stream = output.add_stream(codec, rate=25, options=options)
            stream.width, stream.height = frames[0].width, frames[0].height
            stream.pix_fmt = frames[0].format.name
            stream.codec_context.thread_count = 1
            prepare(stream)
            for number, frame in enumerate(frames):
                frame.pts, frame.time_base = number, Fraction(1, 25)
                output.mux(stream.encode(frame))
            output.mux(stream.encode())
        return Path(file.name).read_bytes()


def nothing(_: VideoStream) -> None:
    """Prepares nothing."""


@pytest.mark.parametrize(
    ("container", "codec", "aspect", "width"),
    [
        ("mp4", "libx264", Fraction(64, 45), 91),
        ("mp4", "libx264", Fraction(1), 64),
        ("mpegts", "libx264", Fraction(8, 9), 57),
        ("avi", "mpeg4", Fraction(64, 45), 91),
    ],
)
def test_pixels_become_square(container: str, codec: str, aspect: Fraction, width: int) -> None:
    def prepare(stream: VideoStream) -> None:
        stream.codec_context.sample_aspect_ratio = aspect

    data = clip(30, 25, container, codec, size=(64, 64), prepare=prepare)
    index = read_packets(bytes_source("video", data))
    assert (index.height_px, index.width_px) == (64, width)


@pytest.mark.parametrize(("container", "codec"), [("mpegts", "mpeg2video"), ("mp4", "libx264"), ("mov", "prores_ks")])
def test_fields_do_not_become_combs(container: str, codec: str) -> None:
    """An edge that moves between the fields of a frame: every second row shows it elsewhere."""
    woven = np.zeros((ROWS, COLUMNS, 3), np.uint8)
    woven[::2, 40:], woven[1::2, 72:] = 255, 255
    flags = {"flags": "+ildct+ilme", "qmin": "1", "qmax": "2"}
    pixel_format = {"mpeg2video": "yuv422p", "libx264": "yuv420p", "prores_ks": "yuv422p10le"}[codec]
    frames = [av.VideoFrame.from_ndarray(woven, format="rgb24").reformat(format=pixel_format) for _ in range(30)]
    data = encoded(frames, container, codec, nothing, **flags)
    with av.open(io.BytesIO(data)) as opened:
        plain = next(opened.decode(video=0))
        assert plain.interlaced_frame
        assert combs(plain.to_ndarray(format="rgb24")) > 100
    assert combs(shown(data)) < 30


def combs(pixels: NDArray[np.uint8]) -> float:
    """How much a row differs from both of its neighbours, where the fields differ."""
    rows = pixels[8:-8, 48:64, 1].astype(float)
    return float(np.minimum(abs(rows[1:-1] - rows[:-2]), abs(rows[1:-1] - rows[2:])).mean())


def pq(nits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Luminance to a PQ signal, 0 to 1. Source: SMPTE ST 2084, equation 5.2."""
    m1, m2, c1, c2, c3 = 2610 / 16384, 2523 / 32, 3424 / 4096, 2413 / 128, 2392 / 128
    power = (nits / 10_000) ** m1
    return ((c1 + c2 * power) / (1 + c3 * power)) ** m2


def hlg(light: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scene light, 0 to 1, to an HLG signal. Source: ARIB STD-B67."""
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    return np.where(light <= 1 / 12, np.sqrt(3 * light), a * np.log(np.maximum(12 * light - b, 1e-9)) + c)


def ten_bits(signal: NDArray[np.float64]) -> av.VideoFrame:
    """A grey frame whose columns have this signal, in limited range."""
    frame = av.VideoFrame(COLUMNS, ROWS, "yuv420p10le")
    luma = np.tile(np.round(64 + 876 * signal).astype("<u2"), (ROWS, 1))
    for plane, values in zip(frame.planes, (luma, *2 * [np.full((ROWS // 2, COLUMNS // 2), 512, "<u2")]), strict=True):
        padded = np.zeros((values.shape[0], plane.line_size // 2), "<u2")
        padded[:, : values.shape[1]] = values
        plane.update(padded.tobytes())
    return frame


@pytest.mark.parametrize(
    ("transfer", "signal"),
    [
        (ColorTrc.SMPTE2084, pq(np.linspace(0, 1000, COLUMNS))),
        pytest.param(ColorTrc.ARIB_STD_B67, hlg(np.linspace(0, 1, COLUMNS)), marks=pytest.mark.deep),
    ],
)
def test_high_dynamic_range_becomes_standard(transfer: ColorTrc, signal: NDArray[np.float64]) -> None:
    """Light from black to 1000 nits: greys stay grey, in order, and white uses the range."""

    def prepare(stream: VideoStream) -> None:
        codec = stream.codec_context
        codec.color_trc, codec.color_primaries = transfer, ColorPrimaries.BT2020
        codec.colorspace, codec.color_range = BT2020_NCL, ColorRange.MPEG

    frame = ten_bits(signal)
    frame.color_trc, frame.color_primaries, frame.colorspace = transfer, ColorPrimaries.BT2020, BT2020_NCL
    frame.color_range = ColorRange.MPEG
    row = shown(encoded([frame], "matroska", "ffv1", prepare))[ROWS // 2].astype(int)
    assert np.ptp(row, axis=1).max() <= 4
    grey = row[:, 1]
    assert (np.diff(grey) >= -1).all()
    assert grey[0] <= 8
    assert grey[-1] >= 190
    # 203 nits are the white of graphics in PQ (ITU-R BT.2408): bright, with room for highlights above.
    if transfer == ColorTrc.SMPTE2084:
        assert 120 <= grey[round(203 / 1000 * (COLUMNS - 1))] <= grey[-1] - 20


@pytest.mark.parametrize("full", [False, True])
def test_ranges_are_respected(full: bool) -> None:
    levels = np.linspace(16, 235, COLUMNS)
    frame = av.VideoFrame(COLUMNS, ROWS, "yuv444p")
    for plane, values in zip(frame.planes, (np.round(levels), *2 * [np.full(COLUMNS, 128)]), strict=True):
        padded = np.zeros((ROWS, plane.line_size), np.uint8)
        padded[:, :COLUMNS] = values
        plane.update(padded.tobytes())
    frame.color_range = ColorRange.JPEG if full else ColorRange.MPEG

    def prepare(stream: VideoStream) -> None:
        stream.codec_context.color_range = frame.color_range

    row = shown(encoded([frame], "mp4", "libx264", prepare, qp="0"))[ROWS // 2, :, 1].astype(float)
    expected = np.round(levels) if full else (np.round(levels) - 16) * 255 / 219
    assert abs(row - expected).max() <= 2


ALPHA_FORMATS = {
    "apng": "rgba", "png": "rgba", "qtrle": "argb", "ffv1": "bgra", "prores_ks": "yuva444p10le",
    "libvpx": "yuva420p", "libvpx-vp9": "yuva420p",
}  # fmt: skip


def copy_of(film: bytes, container: str) -> bytes:
    """The packets of a video in another container."""
    file = io.BytesIO()
    with av.open(io.BytesIO(film), "r") as original, av.open(file, "w", format=container) as output:
        video = original.streams.video[0]
        stream = output.add_stream_from_template(video)
        stream.metadata.update(video.metadata)
        for packet in original.demux(video):
            if packet.size:
                packet.stream = stream
                output.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("apng", "apng"),
        ("mov", "png"),
        ("mov", "qtrle"),
        ("matroska", "ffv1"),
        ("mov", "prores_ks"),
        ("webm", "libvpx"),
        ("webm", "libvpx-vp9"),
        ("matroska", "libvpx-vp9"),
    ],
)
def test_transparent_pixels_lie_on_white(container: str, codec: str) -> None:
    alpha = np.linspace(0, 255, COLUMNS).round()
    pixels = np.zeros((ROWS, COLUMNS, 4), np.uint8)
    pixels[..., 0], pixels[..., 3] = 200, alpha
    frame = av.VideoFrame.from_ndarray(pixels, format="rgba").reformat(format=ALPHA_FORMATS[codec])
    of_vpx = {"auto-alt-ref": "0", "g": "4"} if "vpx" in codec else {}  # its encoder refuses both at once
    copied = container == "matroska" and codec == "libvpx-vp9"  # FFmpeg then writes the name of the tag in upper case
    film = encoded([frame] * 10, "webm" if copied else container, codec, nothing, **of_vpx)
    source = bytes_source("video", copy_of(film, container) if copied else film)
    within = {"prores_ks": 12, "libvpx": 2, "libvpx-vp9": 2}.get(codec, 1)
    for made in decode_frames(source, read_packets(source), [0, 9]):
        row = made.pixels[ROWS // 2].astype(float)
        for channel, colour in enumerate((200, 0, 0)):
            expected = (colour * alpha + 255 * (255 - alpha)) / 255
            assert abs(row[:, channel] - expected).max() <= within


def saved(kind: str, **options: Any) -> bytes:
    """A moving picture of two frames by Pillow."""
    file = io.BytesIO()
    first, second = (Image.new("RGB", (64, 48), colour) for colour in ("red", "blue"))
    first.save(file, kind, save_all=True, append_images=[second], duration=100, **options)
    return file.getvalue()


def test_moving_gif_and_avif_are_videos() -> None:
    for data in (saved("GIF"), saved("AVIF", quality=90)):
        source = bytes_source("video", data)
        index = read_packets(source)
        assert [float(tick * index.times.time_base) for tick in index.times.ticks] == [0, 0.1]
        red, blue = (frame.pixels[24, 32].tolist() for frame in decode_frames(source, index, [0, 1]))
        assert red[0] > 200 > 60 > red[2]
        assert blue[2] > 200 > 60 > blue[0]


HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64)
PLAYLIST = b"#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:2\n#EXTINF:2.4,\npart0.ts\n#EXT-X-ENDLIST\n"
MANIFEST = b'<?xml version="1.0" encoding="utf-8"?>\n<MPD xmlns="urn:mpeg:dash:schema:mpd:2011"></MPD>'
KEY = {"encryption_scheme": "cenc-aes-ctr", "encryption_key": "7" * 32, "encryption_kid": "5" * 32}
FRAGMENTS = {"movflags": "frag_keyframe+empty_moov"}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (HEIC, "HEIC, which is not read: convert it"),
        (saved("WEBP"), "animated WebP, which is not read: convert it"),
        (PLAYLIST, "a playlist of HLS or DASH, which names other files: send one file"),
        (MANIFEST, "a playlist of HLS or DASH, which names other files: send one file"),
        (clip(8, container_options=KEY), "an encrypted MP4 .*, which is not read without its key: send it decrypted"),
        (clip(8, container_options=KEY | FRAGMENTS), "an encrypted MP4 .*: send it decrypted"),
    ],
)
def test_what_is_not_read_is_refused_by_name(data: bytes, text: str) -> None:
    source = bytes_source("video", data)
    with pytest.raises(MediaRejected, match=f"^video is {text}"):
        read_packets(source)
    if data == HEIC:
        with pytest.raises(MediaRejected, match=f"^video is {text}"):
            read_picture(source)
