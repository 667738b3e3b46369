"""What live sessions see, as films in a folder whose index follows: one film of each CLIP_S seconds of a camera.

    films/yard/2026-11-30T09-47-02.125Z.mp4      when its first picture was filmed (UTC); -2 after a clock was set back
               |  |  |  |  |  |  |  |  |         the last frame of each slice, at its time

The video that a camera sends ends in preprocessing; the pictures of slices (`Snapshots.SLICES`) are what comes out of a
session. A film of them is one moment. Each film is added to the index once it is written. The whole folder is read at
the beginning and every SCAN_S: nothing is deleted here, and the index then forgets films that others deleted. Until
then they are not recalled.
"""

from __future__ import annotations

import asyncio
import io
import re
import time
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from itertools import chain, count
from pathlib import Path
from typing import Self

import av
from av.container import OutputContainer
from av.packet import Packet
from av.video.stream import VideoStream
from PIL import Image

from gridsieve.client.client import GridsieveClient
from gridsieve.client.live_events import LiveSlice
from gridsieve.client.prompt import Frames, Part, StrPath, Text, Video
from gridsieve.common.contract.errors import GridsieveError, StartupError
from gridsieve.moments.folder_index import FolderIndex
from gridsieve.search.films import FilmMoment
from gridsieve.search.folder_search import BEST, MAX_FRAMES, FolderSearch

CLIP_S = 10.0
END_S = 4.0
SCAN_S = 3600.0
_TICKS_PER_S = 1000
_UNSAFE = re.compile(r"[^\w.-]+")


@dataclass(frozen=True, slots=True)
class _Picture:
    """time_s: on the session's clock. wall_s: when it was filmed, in seconds since 1970."""

    time_s: float
    wall_s: float
    data: bytes
    size_px: tuple[int, int]


@dataclass(slots=True)
class _Camera:
    """clip: the pictures of the film that is not complete yet. newest: the last ones, of one size."""

    clip: list[_Picture] = field(default_factory=list)
    newest: deque[_Picture] = field(default_factory=lambda: deque(maxlen=MAX_FRAMES))


class Recording:
    """An asynchronous context manager.

    folder, embedder, store: as of `FolderSearch`; the folder must be there. say: takes lines for people, about films
        that cannot be written, or indexed before the next film is.
    Entering raises as `FolderIndex.begin`: InvalidRequest if the folder has an index of other settings. Films that the
    index lacks by then are embedded meanwhile.
    """

    def __init__(
        self,
        folder: StrPath,
        embedder: GridsieveClient,
        *,
        store: str | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._folder, self._say = Path(folder), say
        self._index = FolderIndex(folder, embedder, store=store)
        self._search = FolderSearch(folder, embedder, store=store)  # beside an update, on a connection of its own
        self._stack = AsyncExitStack()
        self._cameras: dict[str, _Camera] = {}
        self._clips: asyncio.Queue[tuple[str, list[_Picture]] | None] = asyncio.Queue()
        self._new: list[str] = []  # films that the index may lack
        self._scan_at_s = 0.0  # time.monotonic
        self._written, self._updating = asyncio.Event(), asyncio.Lock()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._index)
            await stack.enter_async_context(self._search)
            await asyncio.to_thread(self._index.begin, window_s=CLIP_S)
            self._stack = stack.pop_all()
        self._writing = asyncio.create_task(self._write())
        self._following = asyncio.create_task(self._follow())
        self._written.set()
        return self

    async def __aexit__(self, *_: object) -> None:
        """All films are written then. The index has them, too, unless that takes more than END_S: the next update
        goes on with it."""
        async with self._stack:
            try:
                await self._write_all()
                with suppress(TimeoutError):
                    async with asyncio.timeout(END_S):
                        await self._update()
            finally:
                tasks = [self._writing, self._following]
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    def take(self, camera: str, event: LiveSlice) -> None:
        """A slice of a camera's session."""
        if event.filmed is None or not event.filmed.snapshot:
            return
        size_px = Image.open(io.BytesIO(event.filmed.snapshot)).size
        picture = _Picture(event.last_time_s, event.filmed.wall_time_s, event.filmed.snapshot, size_px)
        kept = self._cameras.setdefault(camera, _Camera())
        if kept.newest and not (kept.newest[-1].time_s < picture.time_s and kept.newest[-1].size_px == size_px):
            kept.newest.clear()  # the session began again
            self._close(camera, kept)
        elif kept.clip and picture.time_s >= kept.clip[0].time_s + CLIP_S:
            self._close(camera, kept)
        kept.clip.append(picture)
        kept.newest.append(picture)

    async def complete(self) -> None:
        """Returns once all that was taken is in the index, or was told to fail."""
        await self._write_all()
        self._writing = asyncio.create_task(self._write())
        await self._update()

    async def recalled(self, camera: str, question: str, best: int = BEST) -> tuple[list[Part], list[FilmMoment]]:
        """What precedes a question about a camera: the best earlier moments of the folder, then its newest pictures.

        Returns the moments, too, by file and time. Raises as `FolderSearch.search`.
        """
        moments = await self._search.shown_for(question, best, spread=0)
        moments = await asyncio.to_thread(lambda: [each for each in moments if (self._folder / each.path).is_file()])
        parts = self._search.parts(moments)
        if newest := list(self._cameras[camera].newest) if camera in self._cameras else []:
            frames = Frames(tuple(each.data for each in newest), tuple(each.time_s for each in newest))
            parts += [Text(f"{camera}, live, now, from {_utc(newest[0].wall_s)} on:"), Video(frames=frames)]
        return parts, moments

    async def _write_all(self) -> None:
        for name, camera in self._cameras.items():
            self._close(name, camera)
        self._clips.put_nowait(None)
        await self._writing

    def _close(self, name: str, camera: _Camera) -> None:
        if camera.clip:
            self._clips.put_nowait((name, camera.clip))
            camera.clip = []

    async def _write(self) -> None:
        """Writes films until a None."""
        while (clip := await self._clips.get()) is not None:
            name, pictures = clip
            folder = self._folder / (_UNSAFE.sub("-", name).lstrip(".") or "camera")
            try:
                film = await asyncio.to_thread(_write_film, folder, _utc(pictures[0].wall_s), pictures)
            except (OSError, av.FFmpegError) as error:
                self._say(f"{name}: a film cannot be written: {error}")
            else:
                self._new.append(film.relative_to(self._folder).as_posix())
            self._written.set()

    async def _follow(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._written.wait(), max(0.0, self._scan_at_s - time.monotonic()) or None)
            self._written.clear()
            await self._update()

    async def _update(self) -> None:
        async with self._updating:
            new, scans = list(self._new), time.monotonic() >= self._scan_at_s
            try:
                done = await self._index.update(paths=None if scans else new, window_s=CLIP_S)
            except (GridsieveError, StartupError, OSError) as error:
                self._say(f"the index of {self._folder} does not follow: {error}")
                return
            del self._new[: len(new)]
            if scans:
                self._scan_at_s = time.monotonic() + SCAN_S
        for each in done.skipped:
            self._say(f"{each.path} is left out of the index: {each.error}")


def _utc(wall_s: float) -> str:
    """The name of a film that begins at this time, without its suffix."""
    at = datetime.fromtimestamp(wall_s, UTC)
    return f"{at:%Y-%m-%dT%H-%M-%S}.{at.microsecond // 1000:03d}Z"


def _write_film(folder: Path, name: str, pictures: list[_Picture]) -> Path:
    """An mp4 of H.264, which browsers play. It has its name, with a number if another film has it, once it is
    complete."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{name}.mp4"
    try:
        _encode_film(unfinished, pictures)
        names = chain([name], (f"{name}-{number}" for number in count(2)))
        return unfinished.rename(next(path for each in names if not (path := folder / f"{each}.mp4").exists()))
    finally:
        unfinished.unlink(missing_ok=True)


def _encode_film(path: Path, pictures: list[_Picture]) -> None:
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=_TICKS_PER_S, options={"preset": "veryfast"})
        assert isinstance(stream, VideoStream)
        stream.width, stream.height = (side - side % 2 for side in pictures[0].size_px)  # as yuv420p needs them
        stream.pix_fmt, stream.codec_context.thread_count = "yuv420p", 1
        stream.time_base = stream.codec_context.time_base = Fraction(1, _TICKS_PER_S)
        last_s = pictures[-1].time_s - pictures[0].time_s
        step = round(_TICKS_PER_S * (last_s / (len(pictures) - 1) if last_s else 1))  # the last one lasts as long
        for each in pictures:
            image = Image.open(io.BytesIO(each.data)).convert("RGB").crop((0, 0, stream.width, stream.height))
            frame = av.VideoFrame.from_image(image)
            frame.pts, frame.time_base = round((each.time_s - pictures[0].time_s) * _TICKS_PER_S), stream.time_base
            _mux(container, stream.encode(frame), step)
        _mux(container, stream.encode(), step)


def _mux(container: OutputContainer, packets: list[Packet[VideoStream]], step: int) -> None:
    for packet in packets:
        packet.duration = step
        container.mux(packet)
