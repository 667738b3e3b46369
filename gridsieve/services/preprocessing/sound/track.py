"""The sound track of a file: where it lies on the picture's clock, and its samples at any rate, mixed down to one.

Frames are placed by their times. These are rounded, so samples are counted while frames follow one another; where a
time differs from the counted one by more than rounding explains, the track pauses, or its frames overlap (`runs`).

Packets long before the part that is asked for are read and counted, but not decoded. Nothing is sought: a container's
index may be wrong, and a packet's place would then differ. FFmpeg's decoders leave out what a codec needs before the
first sample (priming), and what an edit list hides. It knows neither models nor features.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, islice

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition

from gridsieve.common.contract.errors import MediaDamaged, MediaRejected
from gridsieve.services.preprocessing.sound.clock import Clock
from gridsieve.services.preprocessing.sound.runs import MARGIN_S, MAX_RATE, Float32Array, Heard, Run
from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.packets import (
    MAX_PTS,
    open_container,
    packets_of,
    read_packets,
    reason_of,
)
from gridsieve.services.preprocessing.video.timing import MAX_LENGTH_S

MAX_DAMAGED_SHARE = 0.1
# Muxers round times to the container's ticks, or to milliseconds where the packets were in Matroska or FLV before. A
# time is off by at most one of these, so a difference of two times by at most two.
_ROUNDING_S = Fraction(1, 1000)
# The first frame is looked for in this many first packets.
_FIRST_PACKETS = 64
# Decoded to find out where the sound ends. A packet of MP3 refers to up to nine before it.
_LAST_PACKETS = 16
# Codecs whose packets depend on those of this time before them alone; the noise that AAC and AC-3 fill in is random.
_FORGETTING = ("aac", "ac3", "alac", "eac3", "flac", "mp2float", "mp3float", "opus")
_LEAD_S = 5
_KINDS = "a sound or a video"


@dataclass(frozen=True, slots=True)
class SoundIndex:
    """A sound track.

    start_s: when its first sample is heard, where the first frame of the video is shown at 0; 0 without a video.
    duration_s: from its first sample to its end, pauses included.
    """

    start_s: Fraction
    duration_s: Fraction


def read_sound(source: Source) -> SoundIndex | None:
    """Reads every packet of the sound track, and decodes the first and the last ones. None: the file has no sound.

    Of several tracks it is the container's default, else the first; one whose codec is read comes before others.
    Raises MediaRejected for a file or codec that is not read, or an exceeded limit; MediaDamaged where more than a
    tenth of a file without a video is missing.
    """
    with open_container(source, kinds=_KINDS) as container:
        stream = _sound_stream(container, source)
        if stream is None or (heard_s := _heard_s(container, stream, source)) is None:
            return None
        shown_s = _picture_begins_s(source)
        if shown_s is None:
            _check_complete(container, stream, source)
    start_s = Fraction(0) if shown_s is None else heard_s[0] - shown_s
    return SoundIndex(start_s, heard_s[1] - heard_s[0])


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
    with open_container(source, kinds=_KINDS) as container:
        stream = _sound_stream(container, source)
        assert stream is not None
        begins_s = _begins_s(source) - index.start_s + start_s
        heard = Heard(round((end_s - start_s) * rate), round(begins_s * rate), rate)
        _Decoding(container, stream, source, heard).run(progress)
    return np.nan_to_num(heard.samples, copy=False, posinf=0.0, neginf=0.0)


def _sound_stream(container: InputContainer, source: Source) -> AudioStream | None:
    """Raises MediaRejected for one that is not read."""
    streams = container.streams.audio
    if not streams:
        return None
    stream = max(streams, key=lambda each: (each.codec_context is not None, each.disposition & Disposition.default))
    if stream.codec_context is None:
        raise MediaRejected("has sound in an unsupported codec", field=source.name)
    _check_rate(stream.codec_context.sample_rate, source)
    stream.codec_context.thread_count = 1
    return stream


def _check_rate(rate: int, source: Source) -> None:
    if not 0 < rate <= MAX_RATE:
        text = f"has sound of {rate} samples a second, it must be from 1 to {MAX_RATE}"
        raise MediaRejected(text, field=source.name, value=rate, limit=MAX_RATE)


def _heard_s(container: InputContainer, stream: AudioStream, source: Source) -> tuple[Fraction, Fraction] | None:
    """When the first sample is heard, and the end of the last one, in the container's time; None without packets.

    Only a decoder knows how much of the last packets is heard, so these are decoded.
    """
    time_base = stream.time_base or Fraction(0)
    clock = Clock(source, container.format.name)
    last: deque[Packet[AudioStream]] = deque(maxlen=_LAST_PACKETS)
    end_s: Fraction | None = None
    for packet in packets_of(container, stream):
        if packet.has_sidedata("encryption_info"):
            raise MediaRejected("has encrypted sound, which is not read without its key", field=source.name)
        if packet.pts is not None and not packet.is_discard:
            if abs(packet.pts) >= MAX_PTS:
                text = f"has sound at {packet.pts} ticks, all must be within ±{MAX_PTS}"
                raise MediaRejected(text, field=source.name)
            shift_s, lasts_s = clock.shift_s, (packet.duration or 0) * time_base
            end_s = clock.shown_s(packet.pts * time_base, lasts_s) + lasts_s
            if clock.shift_s != shift_s:
                last.clear()
        last.append(packet)
    if not last:
        return None
    begins_s = _begins_s(source)
    ends_s = [
        time_s + Fraction(frame.samples, frame.sample_rate) + clock.shift_s
        for packet in (*last, None)
        for frame in _decoded(stream, packet) or ()
        if (time_s := _time_s(frame)) is not None
    ]
    lasts_s = max(Fraction(0), max(ends_s, default=end_s or begins_s) - begins_s)
    if lasts_s > MAX_LENGTH_S:
        text = f"claims to have sound for {float(lasts_s):.0f} s, at most {MAX_LENGTH_S} are allowed"
        raise MediaRejected(text, field=source.name)
    return begins_s, begins_s + lasts_s


def _begins_s(source: Source) -> Fraction:
    """When the first sample is heard, in the container's time: only a decoder knows what is hidden before it."""
    with open_container(source, kinds=_KINDS) as container:
        stream = _sound_stream(container, source)
        assert stream is not None
        first_pts: int | None = None
        for packet in islice(packets_of(container, stream), _FIRST_PACKETS):
            first_pts = packet.pts if first_pts is None else first_pts
            for frame in _decoded(stream, packet) or ():
                if (time_s := _time_s(frame)) is not None:
                    return time_s
        return (first_pts or 0) * (stream.time_base or Fraction(0))


def _picture_begins_s(source: Source) -> Fraction | None:
    """When the first frame of the video is shown, in the container's time; None without a video that is read."""
    try:
        return read_packets(source).begins_s
    except MediaRejected:
        return None


def _check_complete(container: InputContainer, stream: AudioStream, source: Source) -> None:
    """Raises MediaDamaged where more than a tenth of the packets of an MP4's index lie beyond the end of the file."""
    entries, size_bytes = stream.index_entries, container.size
    if container.format.name.startswith("mov"):
        missing = sum(each.pos + each.size > size_bytes for each in entries)
        if missing > MAX_DAMAGED_SHARE * len(entries):
            text = f"is cut off: {missing} of its {len(entries)} packets of sound are missing, at most a tenth may be"
            raise MediaDamaged(text, field=source.name)


class _Decoding:
    """Decodes a track and writes what is heard of it."""

    def __init__(self, container: InputContainer, stream: AudioStream, source: Source, heard: Heard) -> None:
        self._container, self._stream, self._source, self._heard = container, stream, source, heard
        self._clock = Clock(source, container.format.name)
        self._time_base = stream.time_base or Fraction(0)
        self._rounding_s = 2 * max(self._time_base, _ROUNDING_S)
        self._read = self._damaged = 0
        self._run: Run | None = None
        self._last: AudioFrame | None = None  # None: what comes next does not follow what came before

    def run(self, progress: Callable[[], None]) -> None:
        """Raises MediaDamaged if more than a tenth of the packets that it decodes are damaged."""
        for packet in chain(packets_of(self._container, self._stream), (None,)):
            progress()
            if packet is not None and self._passes(packet):
                continue
            self._read += packet is not None
            frames = _decoded(self._stream, packet)
            if frames is None:
                self._damaged += 1
                self._last = None
            if not all(map(self._hears, frames or ())):
                break
        if self._run is not None:
            self._run.finish()
        if self._damaged > MAX_DAMAGED_SHARE * self._read:
            damaged = f"{self._damaged} of {self._read} packets cannot be decoded"
            raise MediaDamaged(f"has damaged sound: {damaged}, at most a tenth may be", field=self._source.name)

    def _passes(self, packet: Packet[AudioStream]) -> bool:
        """Passes a packet so long before the part that it is not decoded: as many samples as the last one had."""
        last, forgets = self._last, self._stream.codec_context.name in _FORGETTING
        if last is None or packet.pts is None or not forgets or self._read < _FIRST_PACKETS:
            return False
        time_s = packet.pts * self._time_base
        if time_s + self._clock.shift_s + _LEAD_S > self._heard.begins_s:
            return False
        self._placed(last, time_s).skip(last.samples)
        return True

    def _hears(self, frame: AudioFrame) -> bool:
        """Adds a frame. False: the part has ended before it."""
        _check_rate(frame.sample_rate, self._source)
        run = self._placed(frame, _time_s(frame))
        if Fraction(run.end, frame.sample_rate) > self._heard.ends_s + MARGIN_S:
            return False
        self._last = frame
        try:
            run.add(frame)
        except MemoryError:
            raise
        except (av.FFmpegError, ValueError) as error:
            text = f"has sound that cannot be mixed ({frame.layout.name}): {reason_of(error)}"
            raise MediaRejected(text, field=self._source.name) from error
        return True

    def _placed(self, frame: AudioFrame, time_s: Fraction | None) -> Run:
        """The run that goes on with a frame like this one, of that time in the container."""
        rate = frame.sample_rate
        place = round(self._clock.shown_s(time_s, Fraction(frame.samples, rate)) * rate)
        rounding = math.ceil(self._rounding_s * rate)
        if self._run is None or self._last is None or not self._run.continues(frame, place, rounding):
            if self._run is not None:
                self._run.finish()
            self._run = Run(frame, place, self._heard)
        return self._run


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
