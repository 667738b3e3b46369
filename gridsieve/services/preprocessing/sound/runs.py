"""Frames of sound that follow one another, mixed down to one channel and resampled as a whole.

    frames      aaaa|bbbb|      |dddd|
    runs        aaaabbbb         dddd
    samples     0000aaaabbbb000000dddd00         silence between them

All runs are resampled on one grid, whose sample 0 is at the clock's time 0, so a sample does not depend on where
decoding begins. It knows neither files nor codecs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import TypeAlias

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.filter import Graph
from numpy.typing import NDArray

Float32Array: TypeAlias = NDArray[np.float32]

# The fastest rate that is sold; FFmpeg reads any number from a header.
MAX_RATE = 768_000
# More than the resampler looks ahead and back: samples do not depend on what is beyond it.
MARGIN_S = Fraction(1, 10)
# Makes FFmpeg divide the weights of channels by their sum, so that a mix of loud channels is not beyond ±1. It does so
# by itself where samples are integers; of floats it leaves it out.
_MIXED = {"out_chlayout": "mono", "out_sample_fmt": "fltp", "rematrix_maxval": "1.0"}


class Heard:
    """The samples of a part, into which runs are written. samples: float32 [count], silence where nothing was."""

    def __init__(self, count: int, first: int, rate: int) -> None:
        """count: of the samples. first: place of the first one on the grid. rate: samples of the grid a second."""
        self.samples = np.zeros(count, np.float32)
        self.rate = rate
        self._first = first
        self._written = first

    @property
    def begins_s(self) -> Fraction:
        return Fraction(self._first, self.rate)

    @property
    def ends_s(self) -> Fraction:
        return Fraction(self._first + self.samples.size, self.rate)

    def write(self, place: int, samples: Float32Array) -> None:
        """Samples from `place` of the grid on. What was written before stays; what is outside the part is left out."""
        begin = max(place, self._written)
        end = min(place + samples.size, self._first + self.samples.size)
        if begin < end:
            self.samples[begin - self._first : end - self._first] = samples[begin - place : end - place]
            self._written = end


class Run:
    """Frames that follow one another, of one rate, format and layout.

    Their samples lie on a grid of their own rate, which begins at time 0, too. Where the first of them is on no sample
    of the other grid, silence fills the time since the last one that both have.

        frames    |  .  .  F  F  F  F        |: a sample of both grids
        samples   |    .    x    x    x

    end: the place after the last frame, on the frames' grid.
    """

    def __init__(self, frame: AudioFrame, place: int, heard: Heard) -> None:
        """frame: the first, which is not added. place: of its first sample on the frames' grid."""
        self._kind = _kind(frame)
        self.end = place
        self._heard = heard
        self._graphs: tuple[Graph, Graph] | None = None
        self._next = self._begin = 0  # places on the grid: of the sample that is made next, and of the first one

    def continues(self, frame: AudioFrame, place: int, rounding: int) -> bool:
        """Whether the frame goes on with the run. place: by its time. rounding: by how many samples that may be off."""
        return _kind(frame) == self._kind and abs(place - self.end) <= rounding

    def add(self, frame: AudioFrame) -> None:
        """Raises ValueError or FFmpegError for a layout that cannot be mixed."""
        begin, self.end = self.end, self.end + frame.samples
        if self._graphs is None:
            if Fraction(self.end, frame.sample_rate) + MARGIN_S < self._heard.begins_s:
                return
            self._start(begin)
        assert self._graphs
        for mixed in _through(self._graphs[0], frame):
            self._resample(mixed)

    def skip(self, samples: int) -> None:
        """Samples long before the part, which are not known."""
        self.end += samples

    def finish(self) -> None:
        """No frame follows."""
        if self._graphs:
            self._resample(None)
            self._graphs = None

    def _start(self, place: int) -> None:
        rate = self._kind[0]
        common = math.gcd(rate, self._heard.rate)
        lead = place % (rate // common)
        self._next = (place - lead) // (rate // common) * (self._heard.rate // common)
        self._begin = -(-place * self._heard.rate // rate)
        self._graphs = _graph(*self._kind, rate), _graph(rate, "fltp", "mono", self._heard.rate)
        if lead:
            self._resample(_silence(lead, rate))

    def _resample(self, mixed: AudioFrame | None) -> None:
        assert self._graphs
        for made in _through(self._graphs[1], mixed):
            samples = made.to_ndarray()[0].astype(np.float32, copy=False)
            hidden = min(max(0, self._begin - self._next), samples.size)
            self._heard.write(self._next + hidden, samples[hidden:])
            self._next += samples.size


def _kind(frame: AudioFrame) -> tuple[int, str, str]:
    return frame.sample_rate, frame.format.name, frame.layout.name


def _graph(rate: int, sample_format: str, layout: str, to_rate: int) -> Graph:
    """Mixes sound down to one channel, float, and resamples it, by FFmpeg's swresample.

    PyAV's AudioResampler is the same graph with a thread for each core, whose stacks count to a worker's memory.
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
