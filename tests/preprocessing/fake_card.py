"""A card that is none: the CPU decodes, and lays frames out as NVDEC does. The entry module of workers that have it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from av.error import FFmpegError
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from gridsieve.services.preprocessing.video.card import Card
from gridsieve.services.preprocessing.workers import worker
from gridsieve.services.preprocessing.workers.worker import Piece, Task
from tests.preprocessing.misbehaving_worker import confined

_SEMI_PLANAR = {"yuv420p": "nv12", "yuvj420p": "nv12", "yuv420p10le": "p010le"}


class CountingCard(Card):
    """on_card: frames that were used, and that the card had made."""

    on_card = 0

    def planar(self, frame: VideoFrame, codec: VideoCodecContext) -> VideoFrame:
        made = super().planar(frame, codec)
        self.on_card += made is not frame
        return made


class FakeCard(CountingCard):
    """failure: raised instead of decoding packet number `at`, or what `reformat` does else with frames from there on.

    opened: names of decoders that were chosen.
    """

    def __init__(self, failure: FFmpegError | dict[str, Any] | None = None, at: int = 0) -> None:
        self.lost = False
        self.accelerator = None  # type: ignore[assignment]
        self.failure, self.at = failure, at
        self.opened: list[str] = []
        self._reformatter = VideoReformatter()

    def decoder_of(self, stream: VideoStream) -> VideoCodecContext:
        made = super().decoder_of(stream)
        self.opened.append(made.name)
        return SemiPlanar(made, self)  # type: ignore[return-value]


class SemiPlanar:
    """A decoder whose frames are NV12 or P010."""

    pix_fmt = "cuda"

    def __init__(self, codec: VideoCodecContext, card: FakeCard) -> None:
        self.__dict__.update(codec=codec, card=card, packets=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codec, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.codec, name, value)

    def decode(self, packet: Packet[VideoStream] | None) -> list[VideoFrame]:
        self.__dict__["packets"] += 1
        failure = self.card.failure if self.packets > self.card.at else None
        if isinstance(failure, FFmpegError):
            raise failure
        frames = self.codec.decode(packet)
        return [
            VideoReformatter().reformat(
                frame, **{"format": _SEMI_PLANAR[frame.format.name], "threads": 1, **(failure or {})}
            )
            for frame in frames
        ]


def lose(task: Task) -> Generator[Piece, None, None]:
    """Tells what the worker's card did, which is then lost."""
    assert isinstance(task.card, FakeCard)
    task.card.lost = True
    yield Piece({"on_card": task.card.on_card})


def main() -> None:
    vars(worker)["Card"] = FakeCard
    worker.main({**worker.JOBS, "confined": confined, "lose": lose}, on_card=True)
