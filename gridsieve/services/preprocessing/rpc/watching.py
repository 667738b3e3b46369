"""Watch: the frames of one stream of encoded video, which comes in the requests or is fetched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from gridsieve.common.contract.errors import InvalidRequest, within
from gridsieve.common.contract.tensors import MAX_PIECE_BYTES, DType
from gridsieve.common.contract.wire import tensor_chunks
from gridsieve.services.preprocessing.fetch.camera import Camera
from gridsieve.services.preprocessing.fetch.fetcher import Fetcher
from gridsieve.services.preprocessing.video.stream import StreamFrame, not_watched
from gridsieve.services.preprocessing.workers.streams import Read, StreamWorkers
from gridsieve.v1 import preprocessing_pb2
from gridsieve.v1.preprocessing_pb2 import WatchRequest, WatchResponse

MAX_FPS = 60.0
_US_PER_S = 1_000_000

# Media types. Source: RFC 8216, 10 (HLS), with the names that are usual beside it; ISO/IEC 23009-1, Annex C (DASH).
_HLS = ("application/vnd.apple.mpegurl", "application/x-mpegurl", "audio/mpegurl", "audio/x-mpegurl")
_PLAYLISTS = dict.fromkeys(_HLS, "HLS") | {"application/dash+xml": "DASH"}
_JPEGS = ("multipart/x-mixed-replace", "image/jpeg", "video/x-motion-jpeg")

Events: TypeAlias = AsyncGenerator[StreamFrame | Read]


@dataclass(frozen=True, slots=True)
class Watching:
    """Serves Watch calls."""

    streams: StreamWorkers
    fetcher: Fetcher

    async def responses(self, requests: AsyncIterator[WatchRequest]) -> AsyncGenerator[WatchResponse]:
        """Raises InvalidRequest for requests out of order, and what the streams and `Fetcher.stream` do."""
        first = await anext(requests, None)
        if first is None or not first.HasField("open"):
            raise InvalidRequest("the first request of a stream must open it")
        opened = first.open
        if not 0 < opened.fps <= MAX_FPS:
            raise InvalidRequest(field="open.fps", limit=f"above 0 and at most {MAX_FPS:g}", value=opened.fps)
        if not opened.url:
            data = _data(requests)
            events = self.streams.events("data", opened.fps, lambda: anext(data, b""))
            with self.streams.place("data", camera=False):
                async with aclosing(events):
                    async for event in events:
                        if isinstance(event, Read):
                            yield WatchResponse(read_bytes=event.size_bytes)
                            continue
                        for response in _frame_responses(event, 0):
                            yield response
            return
        with within("open"), self.streams.place("url", camera=True):
            async with self.fetcher.stream("url", opened.url, 1 / opened.fps) as source:
                if isinstance(source, Camera):
                    events = self.streams.events("url", opened.fps, source)
                elif kind := _PLAYLISTS.get(source.media_type):
                    raise not_watched(kind, "url")
                else:
                    more, jpegs = partial(anext, source.pieces, b""), source.media_type in _JPEGS
                    events = self.streams.events("url", opened.fps, more, live=True, jpegs=jpegs)
                async with aclosing(newest(events)) as frames:
                    async for frame, replaced in frames:
                        for response in _frame_responses(frame, replaced):
                            yield response


async def _data(requests: AsyncIterator[WatchRequest]) -> AsyncIterator[bytes]:
    async for request in requests:
        if not 1 <= len(request.data) <= MAX_PIECE_BYTES:
            limit = f"1 to {MAX_PIECE_BYTES} bytes"
            raise InvalidRequest(field="data", limit=limit, value=f"{len(request.data)} bytes")
        yield request.data


async def newest(events: Events) -> AsyncGenerator[tuple[StreamFrame, int]]:
    """The frames, each with the number of those that it took the place of while the reader was busy."""
    waiting: list[StreamFrame] = []
    replaced = 0
    came = asyncio.Event()

    async def read() -> None:
        nonlocal replaced
        async with aclosing(events):
            async for event in events:
                if isinstance(event, StreamFrame):
                    replaced += len(waiting)
                    waiting[:] = [event]
                    came.set()

    task = asyncio.create_task(read())
    task.add_done_callback(lambda _: came.set())
    try:
        while waiting or not task.done():
            if not waiting:
                came.clear()
                await came.wait()
                continue
            frame, count, replaced = waiting.pop(), replaced, 0
            yield frame, count
        task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


def _frame_responses(frame: StreamFrame, replaced: int) -> Iterator[WatchResponse]:
    """A frame in pieces."""
    first: dict[str, Any] = {"time_s": frame.time_us / _US_PER_S, "replaced": replaced}
    if frame.filmed_us is not None:
        first["filmed_s"] = frame.filmed_us / _US_PER_S
    for chunk in tensor_chunks(DType.UINT8, frame.pixels.shape, frame.pixels.data):
        yield WatchResponse(frame=preprocessing_pb2.WatchedFrame(chunk=chunk, **first))
        first = {}
