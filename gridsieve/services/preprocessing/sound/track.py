"""The sound track of a file: where it lies on the picture's clock, and its samples at any rate, mixed down to one.

    packets     ─▶ frames, each at its time      aaaa|bbbb|      |dddd|
    runs        frames that follow one another   aaaabbbb         dddd        each is resampled as a whole
    samples     0000aaaabbbb000000dddd00         silence where the track has none

Time stamps are rounded, so samples are counted within a run. A frame begins another run where its time differs from the
counted one by more than rounding explains. All runs are resampled on one grid, which begins at the container's time 0,
so a sample does not depend on where decoding begins.

FFmpeg's decoders leave out what a codec needs before the first sample (priming), and what an edit list hides.
It knows neither models nor features.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, islice
from typing import TypeAlias

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.filter import Graph
from av.packet import Packet
from av.stream import Disposition
from numpy.typing import NDArray

from gridsieve.common.contract.errors import MediaDamaged, MediaRejected
from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.packets import (
    MAX_PTS,
    open_container,
    packets_of,
    read_packets,
    reason_of,
)
from gridsieve.services.preprocessing.video.timing import MAX_LENGTH_S

Float32Array: TypeAlias = NDArray[np.float32]

MAX_DAMAGED_SHARE = 0.1
# The fastest that is sold; FFmpeg reads any number from a header.
MAX_RATE = 768_000
# Muxers round times to the container's ticks, or to milliseconds where the packets were in Matroska or FLV before. A
# time is off by at most one of these, so a difference of two times by at most two.
_ROUNDING_S = Fraction(1, 1000)
# The first frame is looked for in this many first packets.
_FIRST_PACKETS = 64
# Decoded to find out where the sound ends. A packet of MP3 refers to up to nine before it.
_LAST_PACKETS = 16
# More than the resampler looks ahead, so that samples do not depend on where decoding ends.
_MARGIN_S = Fraction(1, 10)
# Makes FFmpeg divide the weights of channels by their sum, so that a mix of loud channels is not beyond ±1. It does so
# by itself where samples are integers; of floats it leaves it out.
_MIXED = {"out_chlayout": "mono", "out_sample_fmt": "fltp", "rematrix_maxval": "1.0"}


@dataclass(frozen=True, slots=True)
class SoundIndex:
    """A sound track.

    start_s: when its first sample is heard, where the first frame of the video is shown at 0; 0 without a video.
    duration_s: from its first sample to its end, pauses included. rate: samples a second. codec: FFmpeg's name.
    """

    start_s: Fraction
    duration_s: Fraction
    rate: int
    channels: int
    codec: str


def read_sound(source: Source) -> SoundIndex | None:
    """Reads every packet of the sound track, and decodes the first. None: the file has no sound.

    Of several tracks it is the container's default, else the first; one whose codec is read comes before others.
    Raises MediaRejected for a file or codec that is not read, or an exceeded limit.
    """
    with open_container(source) as container:
        stream = _sound_stream(container, source)
        if stream is None or (heard_s := _heard_s(container, stream, source)) is None:
            return None
        codec = stream.codec_context
        rate, channels, name = codec.sample_rate, codec.channels, codec.name
    shown_s = _picture_begins_s(source)
    start_s = Fraction(0) if shown_s is None else heard_s[0] - shown_s
    return SoundIndex(start_s, heard_s[1] - heard_s[0], rate, channels, name)


def decode_sound(
    source: Source,
    index: SoundIndex,
    start_s: Fraction,
    end_s: Fraction,
    rate: int,
    progress: Callable[[], None] = lambda: None,
) -> Float32Array:
    """Samples of one channel, float32 [round((end_s - start_s) * rate)]; sample n is heard at start_s + n / rate.

    Each is placed to the nearest sample; there is silence before and after the track, and where it pauses. Several
    channels are mixed by FFmpeg's weights. Where frames overlap, the earlier one is heard. Of a packet that cannot be
    decoded there is silence. start_s, end_s: on the clock of `index`. progress: called for each packet that is read.
    Raises MediaDamaged if more than a tenth of the packets that are read cannot be decoded, MediaRejected for exceeded
    limits.
    """
    with open_container(source) as container:
        stream = _sound_stream(container, source)
        assert stream is not None
        zero_s = _begins_s(source) - index.start_s
        heard = _Heard(round((end_s - start_s) * rate), round((zero_s + start_s) * rate), rate)
        _decode(_Frames(container, stream, source, progress), heard, zero_s + end_s)
    return np.nan_to_num(heard.samples, copy=False, posinf=0.0, neginf=0.0)


def _sound_stream(container: InputContainer, source: Source) -> AudioStream | None:
    """Raises MediaRejected for one that is not read."""
    streams = container.streams.audio
    if not streams:
        return None
    stream = max(
        streams, key=lambda each: (each.codec_context is not None, bool(each.disposition & Disposition.default))
    )
    if stream.codec_context is None:
        raise MediaRejected("has sound in an unsupported codec", field=source.name)
    if not 0 < stream.codec_context.sample_rate <= MAX_RATE or not stream.time_base:
        text = f"has sound of {stream.codec_context.sample_rate} samples a second, at most {MAX_RATE} are allowed"
        raise MediaRejected(text, field=source.name)
    stream.codec_context.thread_count = 1
    return stream


def _heard_s(container: InputContainer, stream: AudioStream, source: Source) -> tuple[Fraction, Fraction] | None:
    """When the first sample is heard, and the end of the last one, in the container's time; None without packets.

    Only a decoder knows how much of the last packets is not heard, so these are decoded.
    """
    time_base = stream.time_base or Fraction(0)
    end = 0
    last: deque[Packet[AudioStream]] = deque(maxlen=_LAST_PACKETS)
    for packet in packets_of(container, stream):
        last.append(packet)
        if packet.is_discard or packet.pts is None:
            continue
        if abs(packet.pts) >= MAX_PTS:
            text = f"has sound at {packet.pts} ticks, all must be within ±{MAX_PTS}"
            raise MediaRejected(text, field=source.name)
        end = max(end, packet.pts + (packet.duration or 0))
    if not last:
        return None
    begins_s = _begins_s(source)
    ends_s = [_end_s(frame) for packet in (*last, None) for frame in _decoded(stream, packet) or ()]
    ends_s = [each for each in ends_s if each is not None] or [end * time_base]
    lasts_s = max(0, max(ends_s) - begins_s)
    if lasts_s > MAX_LENGTH_S:
        text = f"claims to have sound for {float(lasts_s):.0f} s, at most {MAX_LENGTH_S} are allowed"
        raise MediaRejected(text, field=source.name)
    return begins_s, begins_s + lasts_s


def _begins_s(source: Source) -> Fraction:
    """When the first sample is heard, in the container's time: only a decoder knows what is hidden before it."""
    with open_container(source) as container:
        stream = _sound_stream(container, source)
        assert stream is not None
        first_pts: int | None = None
        for packet in islice(packets_of(container, stream), _FIRST_PACKETS):
            first_pts = packet.pts if first_pts is None else first_pts
            for frame in _decoded(stream, packet) or ():
                if (time_s := _time_s(frame)) is not None:
                    return time_s
        return (first_pts or 0) * (stream.time_base or Fraction(0))


def _decoded(stream: AudioStream, packet: Packet[AudioStream] | None) -> list[AudioFrame] | None:
    """Frames of a packet; without one, those that the codec holds back. None for one that cannot be decoded."""
    try:
        frames = stream.codec_context.decode(packet)
    except MemoryError:
        raise
    except av.FFmpegError:
        return [] if packet is None else None
    return None if any(frame.is_corrupt for frame in frames) else frames


def _time_s(frame: AudioFrame) -> Fraction | None:
    """When its first sample is heard, in the container's time; None if that is not known."""
    return None if frame.pts is None or frame.time_base is None else frame.pts * frame.time_base


def _end_s(frame: AudioFrame) -> Fraction | None:
    time_s = _time_s(frame)
    return None if time_s is None else time_s + Fraction(frame.samples, frame.sample_rate)


def _picture_begins_s(source: Source) -> Fraction | None:
    """When the first frame of the video is shown, in the container's time; None without a video that is read."""
    try:
        return read_packets(source).begins_s
    except MediaRejected:
        return None


class _Frames:
    """Decoded frames in the order of the file. None stands for a packet that cannot be decoded."""

    def __init__(
        self, container: InputContainer, stream: AudioStream, source: Source, progress: Callable[[], None]
    ) -> None:
        self.rounding_s = 2 * max(stream.time_base or Fraction(0), _ROUNDING_S)
        self.source = source
        self._container, self._stream = container, stream
        self._progress = progress
        self._read = self._damaged = 0

    def __iter__(self) -> Iterator[AudioFrame | None]:
        for packet in chain(packets_of(self._container, self._stream), (None,)):
            self._progress()
            self._read += packet is not None
            frames = _decoded(self._stream, packet)
            if frames is None:
                self._damaged += 1
                yield None
            for frame in frames or ():
                if frame.sample_rate > MAX_RATE:
                    text = f"has sound of {frame.sample_rate} samples a second, at most {MAX_RATE} are allowed"
                    raise MediaRejected(text, field=self.source.name)
                yield frame

    def check_damage(self) -> None:
        """Raises MediaDamaged if more than a tenth of the packets could not be decoded."""
        if self._damaged > MAX_DAMAGED_SHARE * self._read:
            text = (
                f"has damaged sound: {self._damaged} of {self._read} packets cannot be decoded, at most a tenth may be"
            )
            raise MediaDamaged(text, field=self.source.name)


class _Heard:
    """The samples of a part. They lie on a grid whose sample 0 is at the container's time 0."""

    def __init__(self, count: int, first: int, rate: int) -> None:
        """count: of the samples. first: place of the first one on the grid."""
        self.samples = np.zeros(count, np.float32)
        self.rate = rate
        self._first = first
        self._written = first

    def write(self, place: int, samples: Float32Array) -> None:
        """Samples from `place` of the grid on. What was written before stays; what is outside the part is left out."""
        begin = max(place, self._written)
        end = min(place + samples.size, self._first + self.samples.size)
        if begin < end:
            self.samples[begin - self._first : end - self._first] = samples[begin - place : end - place]
            self._written = end


class _Run:
    """Frames that follow one another, of one rate, format and layout.

    The first is placed on the grid of the frames' own rate, which begins at the container's time 0, too. Where the
    grids of both rates have no sample in common, silence before the frame fills the time from the last one they have.

        frames    |  .  .  F  F  F  F        |: a sample of both grids
        samples   |    .    x    x    x
    """

    def __init__(self, frame: AudioFrame, place: int, heard: _Heard, source: Source) -> None:
        """place: of the frame's first sample."""
        self._kind = _kind(frame)
        self.end = place
        self._heard = heard
        rate, common = frame.sample_rate, math.gcd(frame.sample_rate, heard.rate)
        lead = place % (rate // common)
        self._next = (place - lead) // (rate // common) * (heard.rate // common)
        self._begin = -(-place * heard.rate // rate)
        try:
            self._mixer = _graph(*self._kind, rate)
            self._resampler = _graph(rate, "fltp", "mono", heard.rate)
            if lead:
                self._push(_silence(lead, rate))
        except MemoryError:
            raise
        except (av.FFmpegError, ValueError) as error:
            text = f"has sound that cannot be mixed ({frame.layout.name}): {reason_of(error)}"
            raise MediaRejected(text, field=source.name) from error

    def continues(self, frame: AudioFrame, place: int | None, rounding: int) -> bool:
        """place: by its time stamp; None without one. rounding: by how many samples that may be wrong."""
        return _kind(frame) == self._kind and (place is None or abs(place - self.end) <= rounding)

    def add(self, frame: AudioFrame) -> None:
        self.end += frame.samples
        for mixed in _through(self._mixer, frame):
            self._push(mixed)

    def finish(self) -> None:
        self._push(None)

    def _push(self, mixed: AudioFrame | None) -> None:
        for made in _through(self._resampler, mixed):
            samples = made.to_ndarray()[0].astype(np.float32, copy=False)
            hidden = min(max(0, self._begin - self._next), samples.size)
            self._heard.write(self._next + hidden, samples[hidden:])
            self._next += samples.size


def _decode(frames: _Frames, heard: _Heard, end_s: Fraction) -> None:
    """Writes what is heard up to end_s, in the container's time."""
    run: _Run | None = None
    at_s = Fraction(0)  # where a frame without a time is heard
    for frame in frames:
        if frame is None:
            _finished(run)
            run = None
            continue
        rate = frame.sample_rate
        time_s = _time_s(frame)
        if time_s is not None and time_s > end_s + _MARGIN_S:
            break
        place = None if time_s is None else round(time_s * rate)
        if run is None or not run.continues(frame, place, math.ceil(frames.rounding_s * rate)):
            _finished(run)
            run = _Run(frame, round(at_s * rate) if place is None else place, heard, frames.source)
        run.add(frame)
        at_s = Fraction(run.end, rate)
    _finished(run)
    frames.check_damage()


def _finished(run: _Run | None) -> None:
    if run is not None:
        run.finish()


def _kind(frame: AudioFrame) -> tuple[int, str, str]:
    return frame.sample_rate, frame.format.name, frame.layout.name


def _graph(rate: int, sample_format: str, layout: str, to_rate: int) -> Graph:
    """Mixes sound down to one channel, float, and resamples it, with as many samples as last as long.

    PyAV's AudioResampler is the same graph, for which FFmpeg starts a thread for each core.
    """
    graph = Graph()
    graph.threads = 1
    begin = graph.add(
        "abuffer", sample_rate=str(rate), sample_fmt=sample_format, channel_layout=layout, time_base=f"1/{rate}"
    )
    middle = graph.add("aresample", out_sample_rate=str(to_rate), **_MIXED)
    graph.link_nodes(begin, middle, graph.add("abuffersink")).configure()
    return graph


def _silence(samples: int, rate: int) -> AudioFrame:
    frame = AudioFrame.from_ndarray(np.zeros((1, samples), np.float32), format="fltp", layout="mono")
    frame.sample_rate = rate
    return frame


def _through(graph: Graph, frame: AudioFrame | None) -> Iterator[AudioFrame]:
    """What a graph has made once it got a frame; None ends it."""
    graph.push(frame)
    while True:
        try:
            made = graph.pull()
        except (av.error.BlockingIOError, av.error.EOFError):
            return
        assert isinstance(made, AudioFrame)
        yield made
