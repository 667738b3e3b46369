"""Media with sound: tones, clicks and noise at known times, encoded by PyAV."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.audio.stream import AudioStream
from av.packet import Packet
from numpy.typing import NDArray

from gridsieve.services.preprocessing.sound.runs import Float32Array

RATE = 16_000
# Times in an MP4's header are rounded to its own time base, which is 1/1000 s.
EXACT_MP4 = {"movie_timescale": "48000"}


@dataclass(frozen=True)
class Track:
    """A sound track of `samples`, float32 [channels, N], whose first one has the time begin_s.

    gap: moves the times of samples from a place on, by a number of seconds. times: changes those of packets, in ticks.
    """

    samples: Float32Array
    codec: str = "pcm_s16le"
    rate: int = 44_100
    layout: str = "mono"
    begin_s: Fraction = Fraction(0)
    gap: tuple[int, Fraction] | None = None
    default: bool = True
    options: dict[str, str] = field(default_factory=dict)


def sound_file(
    container: str,
    *tracks: Track,
    picture: str | None = None,
    picture_begin_s: Fraction = Fraction(0),
    options: dict[str, str] | None = None,
    frames: int = 50,
) -> bytes:
    """A file with these tracks and, with a codec for it, a picture of 25 frames a second."""
    with tempfile.NamedTemporaryFile() as file:
        with av.open(file.name, "w", format=container, options=options or {}) as output:
            video = output.add_stream(picture, rate=25) if picture else None
            streams = [_added(output, track) for track in tracks]
            packets = []
            if video is not None:
                assert isinstance(video, av.VideoStream)
                video.width = video.height = 64
                video.pix_fmt, video.codec_context.thread_count = "yuv420p", 1
                for number in range(frames):
                    frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), number % 256, np.uint8), format="rgb24")
                    frame.pts, frame.time_base = number + int(picture_begin_s * 25), Fraction(1, 25)
                    packets += video.encode(frame)
                packets += video.encode()
            for track, stream in zip(tracks, streams, strict=True):
                packets += _encoded(track, stream)
            output.mux(packets)
        return Path(file.name).read_bytes()


def _added(output: av.container.OutputContainer, track: Track) -> AudioStream:
    stream = output.add_stream(track.codec, rate=track.rate, options=track.options)
    assert isinstance(stream, AudioStream)
    stream.layout = track.layout
    stream.codec_context.time_base = Fraction(1, track.rate)
    stream.disposition = av.stream.Disposition.default if track.default else av.stream.Disposition(0)
    return stream


def _encoded(track: Track, stream: AudioStream) -> list[Packet[AudioStream]]:
    codec = stream.codec_context
    codec.open()
    step = codec.frame_size or 1000
    packets = []
    for first in range(0, track.samples.shape[1], step):
        frame = audio_frame(track.samples[:, first : first + step], track.rate, track.layout)
        moved_s = track.begin_s + (track.gap[1] if track.gap and first >= track.gap[0] else 0)
        frame.pts, frame.time_base = first + round(moved_s * track.rate), Fraction(1, track.rate)
        for each in av.AudioResampler(format=codec.format, layout=track.layout, rate=track.rate).resample(frame):
            each.pts, each.time_base = frame.pts, frame.time_base
            packets += codec.encode(each)
    packets += codec.encode(None)
    for packet in packets:
        packet.stream = stream
    return packets


def audio_frame(samples: Float32Array, rate: int, layout: str) -> av.AudioFrame:
    """samples: float32 [channels, N]."""
    interleaved = np.ascontiguousarray(samples.T).reshape(1, -1)
    frame = av.AudioFrame.from_ndarray(interleaved, format="flt", layout=layout)
    frame.sample_rate = rate
    return frame


def clicks(at_s: Sequence[float], lasts_s: float, rate: int = 44_100, channels: int = 1) -> Float32Array:
    """float32 [channels, N]: one loud sample at each of these times."""
    made = np.zeros((channels, round(lasts_s * rate)), np.float32)
    made[:, [round(each * rate) for each in at_s]] = 0.9
    return made


def tone(hz: float, lasts_s: float, rate: int = 44_100, loud: float = 0.5) -> Float32Array:
    """float32 [1, N]."""
    return (loud * np.sin(2 * np.pi * hz * np.arange(round(lasts_s * rate)) / rate)).astype(np.float32)[None]


def noise(lasts_s: float, rate: int = 44_100, channels: int = 1) -> Float32Array:
    """float32 [channels, N]."""
    random = np.random.default_rng(0).uniform(-0.5, 0.5, (channels, round(lasts_s * rate)))
    return random.astype(np.float32)


def heard_at(samples: Float32Array, time_s: float) -> int:
    """By how many samples at RATE the loudest one within 50 ms of a time is late."""
    place, around = round(time_s * RATE), RATE // 20
    return int(np.abs(samples[max(0, place - around) : place + around]).argmax()) - min(place, around)


def remuxed(
    data: bytes, container: str, change: Callable[[int, Packet[Any]], bool], options: dict[str, str] | None = None
) -> bytes:
    """The same packets in another container. change: is given the number of each packet of sound; False drops it."""
    with tempfile.NamedTemporaryFile() as file:
        with (
            av.open(io.BytesIO(data), "r") as original,
            av.open(file.name, "w", format=container, options=options or {}) as output,
        ):
            streams = {each.index: output.add_stream_from_template(each) for each in original.streams}
            number = -1
            for packet in original.demux():
                number += packet.stream.type == "audio"
                if packet.size and (packet.stream.type != "audio" or change(number, packet)):
                    packet.stream = streams[packet.stream.index]
                    output.mux(packet)
        return Path(file.name).read_bytes()


def swept(hz: float, lasts_s: float) -> NDArray[np.float64]:
    """The same as `tone` at RATE, float64 [N]: what a resampled tone must be."""
    return 0.5 * np.sin(2 * np.pi * hz * np.arange(round(lasts_s * RATE)) / RATE)
