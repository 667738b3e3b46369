"""Sound is heard where its container says, on the picture's clock, whatever holds and encodes it."""

from __future__ import annotations

import io
import math
import sysconfig
import wave
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.packet import Packet

from gridsieve.common.contract.errors import MediaDamaged, MediaRejected
from gridsieve.services.preprocessing.sound.runs import Float32Array
from gridsieve.services.preprocessing.sound.track import SoundIndex, decode_sound, read_sound
from gridsieve.services.preprocessing.sources.source import bytes_source
from tests.preprocessing.preprocessing_media import clip
from tests.preprocessing.sound.sounds import (
    EXACT_MP4,
    RATE,
    Track,
    clicks,
    heard_at,
    noise,
    remuxed,
    sound_file,
    swept,
    tone,
)

CLICKS_S = (0.5, 1.25, 1.8)
HALF = Fraction(1, 2)
# Of an encoder that spreads a click, or a container that rounds times to milliseconds.
LOSSY = RATE // 500


def read(data: bytes) -> SoundIndex:
    index = read_sound(bytes_source("clip", data))
    assert index is not None
    return index


def decode(data: bytes, start_s: Fraction | int = 0, end_s: Fraction | int = 2, rate: int = RATE) -> Float32Array:
    return decode_sound(bytes_source("clip", data), read(data), Fraction(start_s), Fraction(end_s), rate)


@pytest.mark.parametrize(
    ("container", "codec", "picture", "within"),
    [
        ("wav", "pcm_s16le", None, 0),
        ("wav", "pcm_mulaw", None, 0),
        ("aiff", "pcm_s16be", None, 0),
        ("matroska", "wavpack", None, 0),
        ("matroska", "eac3", None, LOSSY),
        ("ogg", "vorbis", None, LOSSY),
        ("flac", "flac", None, 0),
        ("mp3", "libmp3lame", None, LOSSY),
        ("ogg", "libopus", None, LOSSY),
        ("adts", "aac", None, LOSSY),
        ("mp4", "aac", "libx264", LOSSY),
        ("mp4", "alac", "libx264", 0),
        ("mov", "pcm_s16le", "libx264", 0),
        ("matroska", "flac", "libx264", 0),
        ("matroska", "aac", "libx264", LOSSY),
        ("matroska", "ac3", "libx264", LOSSY),
        ("webm", "libopus", "libvpx", LOSSY),
        ("mpegts", "aac", "libx264", LOSSY),
        ("mpegts", "mp2", "libx264", LOSSY),
        ("flv", "aac", "libx264", LOSSY),
        ("avi", "pcm_s16le", "mpeg4", 0),
        ("asf", "wmav2", "mpeg4", LOSSY),
        ("mpeg", "mp2", "mpeg2video", LOSSY),
        ("mpegts", "libopus", "libx264", LOSSY),
        ("mp4", "libopus", "libx264", LOSSY),
    ],
)
def test_a_click_is_heard_at_its_time(container: str, codec: str, picture: str | None, within: int) -> None:
    rate = {"libopus": 48_000, "pcm_mulaw": 8000}.get(codec, 44_100)
    options = {"vorbis": {"strict": "experimental"}, "wmav2": {"b": "128000"}}.get(codec, {})
    track = Track(clicks(CLICKS_S, 2, rate, channels=2), codec, rate, "stereo", options=options)
    data = sound_file(container, track, picture=picture)
    index, samples = read(data), decode(data)
    priming_s = 1024 / 44_100 if container == "adts" else 0  # of which only such a file says nothing
    assert all(abs(heard_at(samples, priming_s + each)) <= within for each in CLICKS_S)
    assert index.start_s + index.duration_s == pytest.approx(2, abs=0.06)


@pytest.mark.parametrize(
    ("codec", "rate"),
    [
        ("pcm_u8", 8000),
        ("pcm_s16le", 11_025),
        ("pcm_s16le", 16_000),
        ("pcm_s24le", 22_050),
        ("pcm_s32le", 44_100),
        ("pcm_f32le", 48_000),
        ("pcm_f64le", 96_000),
    ],
)
def test_a_tone_of_any_rate_and_format_becomes_the_same_tone(codec: str, rate: int) -> None:
    samples = decode(sound_file("wav", Track(tone(440, 1, rate), codec, rate)), 0, 1)
    inner = slice(RATE // 50, -RATE // 50)
    assert np.allclose(samples[inner], swept(440, 1)[inner], atol=1e-2 if codec == "pcm_u8" else 1e-3)


SIDE = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("layout", "weights"),
    [
        ("mono", (1,)),
        ("stereo", (SIDE, SIDE)),
        ("2.1", (SIDE, SIDE, 0)),
        ("5.1", (SIDE, SIDE, 1, 0, 0.5, 0.5)),
        ("7.1", (SIDE, SIDE, 1, 0, 0.5, 0.5, 0.5, 0.5)),
    ],
)
def test_channels_are_mixed_by_ffmpegs_weights(layout: str, weights: tuple[float, ...]) -> None:
    """ITU-R BS.775: the centre, and the others 3 dB below; behind, 3 dB below those; all divided by their sum."""
    channels = noise(1, RATE, len(weights))
    mixed = np.asarray(weights) @ channels / sum(weights)
    data = sound_file("matroska", Track(channels, "pcm_f32le", RATE, layout))
    assert np.allclose(decode(data, 0, 1), mixed, atol=1e-6)


@pytest.mark.parametrize(("codec", "container"), [("aac", "mp4"), ("libmp3lame", "matroska"), ("flac", "matroska")])
def test_samples_are_those_of_pyav(codec: str, container: str) -> None:
    data = sound_file(container, Track(noise(1, channels=2), codec, layout="stereo"))
    resampler = av.AudioResampler(format="fltp", layout="stereo", rate=RATE)
    with av.open(io.BytesIO(data)) as file:
        frames = [each for frame in (*file.decode(audio=0), None) for each in resampler.resample(frame)]
    expected = np.concatenate([frame.to_ndarray() for frame in frames], axis=1).mean(axis=0)
    samples = decode(data, 0, 1)
    assert np.allclose(samples, expected[: samples.size], atol=1e-5)


@pytest.mark.parametrize("container", ["matroska", "mp4", "mov", "mpegts"])
@pytest.mark.parametrize("begin_s", [HALF, Fraction(-3, 10)])
def test_a_track_may_begin_before_or_after_the_picture(container: str, begin_s: Fraction) -> None:
    """In Matroska and transport streams, all times are later by as much as the first one is below 0."""
    codec, rate, exact = {"mpegts": ("mp2", 48_000, LOSSY), "matroska": ("flac", 48_000, 0)}.get(
        container, ("alac", 48_000, 0)
    )
    track = Track(clicks(CLICKS_S, 2, rate), codec, rate, begin_s=begin_s)
    data = sound_file(container, track, picture="libx264", options=EXACT_MP4 if container in ("mp4", "mov") else None)
    index = read(data)
    cut = container in ("mp4", "mov") and begin_s < 0  # the edit list hides what is before the picture
    assert index.start_s == pytest.approx(0 if cut else begin_s, abs=0.02 if exact else 1e-3)
    samples = decode(data, -1, 3)
    assert samples.size == 4 * RATE
    assert all(abs(heard_at(samples, 1 + begin_s + each)) <= exact for each in CLICKS_S)


def test_silence_is_where_the_track_has_nothing() -> None:
    data = sound_file("matroska", Track(noise(1), "flac", begin_s=HALF), picture="libx264")
    samples = decode(data, -1, 3)
    is_silent = samples == 0
    assert is_silent[: 3 * RATE // 2].all()
    assert is_silent[5 * RATE // 2 + 20 :].all()
    assert is_silent[3 * RATE // 2 : 5 * RATE // 2].mean() < 0.01


@pytest.mark.parametrize(
    ("container", "codec", "begin"), [("matroska", "pcm_s16le", 48_000), ("mp4", "alac", 11 * 4096)]
)
def test_a_pause_in_the_times_is_silence(container: str, codec: str, begin: int) -> None:
    track = Track(tone(440, 2, 48_000), codec, 48_000, gap=(begin, Fraction(1, 4)))
    options = EXACT_MP4 if container == "mp4" else None
    samples, played = decode(sound_file(container, track, picture="libx264", options=options)), swept(440, 2)
    pause = slice(math.ceil(begin / 3), math.ceil(begin / 3) + RATE // 4)
    expected = np.concatenate((played[: pause.start], np.zeros(RATE // 4), played[pause.start : -RATE // 4]))
    near = np.concatenate([np.arange(-50, 50) + place for place in (50, pause.start, pause.stop)])
    assert np.abs(np.delete(samples - expected, near)).max() < 1e-3
    assert np.abs(samples[pause][50:-50]).max() == 0


def test_of_frames_that_overlap_the_earlier_is_heard() -> None:
    values = np.where(np.arange(88_200) < 46_080, 0.25, 0.5)[None].astype(np.float32)
    samples = decode(sound_file("matroska", Track(values, "flac", gap=(46_080, Fraction(-1, 20)))))
    edge = math.ceil(46_080 / 44_100 * RATE)
    assert np.allclose(samples[50 : edge - 50], 0.25, atol=1e-3)
    assert np.allclose(samples[edge + 50 : edge + RATE // 2], 0.5, atol=1e-3)


@pytest.mark.parametrize("jitter_ms", [1, -1])
def test_a_rounded_time_makes_no_gap(jitter_ms: int) -> None:
    """Of a tone in milliseconds each packet's place is off by up to 16 samples: a mistake of half a one would show."""

    def change(number: int, packet: Packet[Any]) -> bool:
        assert packet.pts is not None
        packet.pts += jitter_ms * (number % 2)
        packet.dts = packet.pts
        return True

    data = remuxed(sound_file("matroska", Track(tone(440, 1), "flac")), "matroska", change)
    inner = slice(RATE // 50, -RATE // 50)
    assert np.allclose(decode(data, 0, 1)[inner], swept(440, 1)[inner], atol=1e-3)


@pytest.mark.parametrize(("container", "codec"), [("matroska", "flac"), ("mp4", "libmp3lame"), ("mp4", "libopus")])
def test_a_part_is_a_part_of_the_whole(container: str, codec: str) -> None:
    """The last one begins so late that packets before it are not decoded."""
    rate = 48_000 if codec == "libopus" else 44_100
    data = sound_file(container, Track(noise(16, rate), codec, rate), picture="mpeg4", frames=16 * 25)
    source, index = bytes_source("clip", data), read(data)
    whole = decode_sound(source, index, Fraction(0), Fraction(16), RATE)
    for part in ("1/16 1/8", "5/4 2", "25/2 15"):
        start_s, end_s = map(Fraction, part.split())
        expected = whole[int(start_s * RATE) : int(end_s * RATE)]
        assert np.abs(decode_sound(source, index, start_s, end_s, RATE) - expected).max() < 1e-6


@pytest.mark.parametrize(("default", "hz"), [((True, False), 440), ((False, True), 880), ((False, False), 440)])
def test_the_default_track_is_heard_else_the_first(default: tuple[bool, bool], hz: float) -> None:
    tracks = (Track(tone(each, 1), "flac", default=first) for each, first in zip((440, 880), default, strict=True))
    inner = slice(RATE // 50, -RATE // 50)
    assert np.allclose(decode(sound_file("matroska", *tracks), 0, 1)[inner], swept(hz, 1)[inner], atol=1e-3)


def damaged(numbers: Callable[[int], bool]) -> bytes:
    """Two seconds in FLAC, of which these packets, of 4608 samples, are damaged."""

    def change(number: int, packet: Packet[Any]) -> bool:
        if numbers(number):
            packet.update(b"\0" * packet.size)  # type: ignore[arg-type]
        return True

    return remuxed(sound_file("mp4", Track(noise(3), "flac")), "mp4", change)


def test_a_damaged_packet_is_silence() -> None:
    data, whole = damaged(lambda number: number == 7), damaged(lambda number: False)
    samples, expected = decode(data, 0, 3), decode(whole, 0, 3)
    differs = np.flatnonzero(np.abs(samples - expected) > 1e-6)
    begin, end = (RATE * 4608 * each // 44_100 for each in (7, 8))
    assert begin - 40 <= differs[0] <= begin + 40
    assert end - 40 <= differs[-1] <= end + 40
    assert np.abs(samples[begin + 40 : end - 40]).max() == 0


@pytest.mark.parametrize(
    ("numbers", "text"), [(lambda number: number % 4 == 3, "7 of 29"), (lambda number: True, "29 of 29")]
)
def test_more_than_a_tenth_of_damaged_packets_is_refused(numbers: Callable[[int], bool], text: str) -> None:
    with pytest.raises(
        MediaDamaged, match=f"^clip has damaged sound: {text} packets cannot be decoded, at most a tenth"
    ) as caught:
        decode(damaged(numbers), 0, 3)
    assert caught.value.field == "clip"


def test_a_recording_that_was_cut_off_is_refused() -> None:
    data = sound_file("mp4", Track(noise(3), "aac"), options={"movflags": "faststart"})
    with pytest.raises(
        MediaDamaged, match=r"^clip is cut off: \d+ of its 131 packets of sound are missing, at most a tenth"
    ):
        read(data[: len(data) * 3 // 4])


def test_joined_recordings_are_heard_one_after_the_other_with_their_pictures() -> None:
    part = sound_file("mpegts", Track(clicks((0.5, 1.5), 1.8, 48_000), "mp2", 48_000), picture="mpeg2video")
    data = part + part + part
    assert read(data).duration_s == pytest.approx(5.8, abs=0.05)
    samples = decode(data, 0, 6)
    assert all(abs(heard_at(samples, 2 * number + each)) <= LOSSY for number in range(3) for each in (0.5, 1.5))


def test_a_clock_that_starts_again_without_end_is_refused() -> None:
    part = sound_file("mpegts", Track(tone(440, 0.15, 48_000), "mp2", 48_000))
    with pytest.raises(MediaRejected, match=r"^clip has a clock of sound that starts again more than 1000 times$"):
        read(1010 * part)


def test_sound_whose_channels_have_no_places_is_refused() -> None:
    data = bytearray(sound_file("wav", Track(noise(1, RATE), rate=RATE)))
    data[22:24], data[32:34] = (9).to_bytes(2, "little"), (18).to_bytes(2, "little")  # channels, bytes of all of them
    with pytest.raises(MediaRejected, match=r"^clip has sound that cannot be mixed \(9 channels\): Invalid argument$"):
        decode(bytes(data))


def test_a_file_without_sound_has_none() -> None:
    assert read_sound(bytes_source("clip", clip(4))) is None


def test_encrypted_sound_is_refused() -> None:
    key = dict.fromkeys(("encryption_key", "encryption_kid"), "00112233445566778899aabbccddeeff")
    data = sound_file("mp4", Track(noise(1), "aac"), options={"encryption_scheme": "cenc-aes-ctr", **key})
    with pytest.raises(MediaRejected, match=r"^clip has encrypted sound, which is not read without its key$"):
        read(data)


def test_what_is_no_media_is_refused() -> None:
    with pytest.raises(MediaRejected, match=r"^clip cannot be read as a sound or a video: Invalid data") as caught:
        read(b"no sound at all" * 100)
    assert caught.value.field == "clip"


@pytest.mark.parametrize("name", ["pluck-pcm8", "pluck-pcm16", "pluck-pcm24", "pluck-pcm32"])
def test_a_recording_by_other_hands_is_read_as_pythons_own_module_reads_it(name: str) -> None:
    path = Path(sysconfig.get_path("stdlib"), "test", "audiodata", f"{name}.wav")
    if not path.is_file():
        pytest.skip("this Python has no test.audiodata")
    with wave.open(str(path)) as file:
        channels, width, rate, count = file.getparams()[:4]
        stored = np.frombuffer(file.readframes(count), np.uint8).reshape(count * channels, width)
    values = np.zeros(len(stored), np.int64)
    for byte in range(width):
        values |= stored[:, byte].astype(np.int64) << 8 * byte
    middle = 2 ** (8 * width - 1)
    values = values - middle if width == 1 else (values ^ middle) - middle
    samples = decode(path.read_bytes(), 0, Fraction(count, rate), rate)
    assert np.allclose(samples, (values / middle).reshape(count, channels).mean(axis=1), atol=1e-6)
