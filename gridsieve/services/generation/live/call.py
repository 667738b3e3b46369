"""One live session: what its caller sends, and the order in which slices and questions are served.

read    frame frame │ frame frame │ ask │ frame …          ahead of the work: the newest frame is known
work    encode and compute a slice │ the next one │ answer the question │ …
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import structlog

from gridsieve.common.contract.errors import InvalidRequest, Overloaded, Unavailable, steps_of
from gridsieve.services.generation.live.ask import Ask, pulled
from gridsieve.services.generation.live.frames import SLICE_FRAMES, DropReason, FramePair, Frames, Waiting
from gridsieve.services.generation.live.options import Options, ask_of
from gridsieve.services.generation.live.pictures import picture_of
from gridsieve.services.generation.live.responses import LiveResponses
from gridsieve.services.generation.live.segments import SegmentFailed, Segments
from gridsieve.services.generation.live.service import LiveService
from gridsieve.services.generation.live.session_writer import SessionWriter, check_upstream
from gridsieve.services.generation.live.streams import Streams
from gridsieve.services.generation.request.session import Session
from gridsieve.services.generation.upstream.watch import WatchedFrame
from gridsieve.v1 import generation_pb2
from gridsieve.v1.generation_pb2 import LiveRequest

MAX_WAITING_QUESTIONS = 16

log = structlog.get_logger()


class LiveCall:
    """Serves one Live call. Raises InvalidRequest for what its `open` must not say.

    options: makes the arguments of an upstream call that begins now: what time is left, and metadata. charge: counts
    bytes that the call holds; raises Overloaded or InvalidRequest beyond a quota.
    """

    def __init__(
        self,
        opened: generation_pb2.LiveOpen,
        request_id: str,
        service: LiveService,
        options: Callable[[], dict[str, Any]],
        charge: Callable[[int], None],
    ) -> None:
        engine, media, model = service.engine, service.media, service.model
        self._wanted = wanted = Options.of(opened, model)
        if opened.source_name:
            structlog.contextvars.bind_contextvars(source_name=wanted.source_name)
        self._engine, self._media, self._sources, self._options = engine, media, service.sources, options
        block_tokens = wanted.live.block_tokens
        self._session = session = Session(request_id, wanted.window_tokens, wanted.answer_tokens, block_tokens)
        self._responses = LiveResponses(session, model.tokenizer, wanted.snapshots)
        self.responses = self._responses.queue
        segments = Segments(wanted, session, self._responses, engine, model, service.inbox)
        self._writer = SessionWriter(wanted, session, self._responses, segments, media, model, options)
        self._sessions, self._charge, self._charged_bytes = service.sessions, charge, 0
        self._frames = Frames(wanted.fps, service.sessions.hold)
        self._waiting: Waiting[Ask] = Waiting(lambda late: self._responses.count_dropped(late.used, DropReason.LATE))
        self._asked: list[Ask] = []  # questions that are not finished, in no order
        self._came, self._closed = asyncio.Event(), False
        self._serving: FramePair | Ask | None = None
        self._running: asyncio.Task[None] | None = None
        self._ended_by: Exception | None = None
        self.over = asyncio.Event()
        self._goes_without = False  # the last slice or question failed because of another service
        self._kind = "source" if wanted.source else ""  # of what brings its frames; empty: nothing has yet

    async def run(self, requests: AsyncIterator[LiveRequest]) -> None:
        """Serves the session until it is closed and everything that was asked is answered; then its blocks are free."""
        session, self._running = self._session, asyncio.current_task()
        try:
            await self._open()
            await self._responses.put_accepted()
            async with AsyncExitStack() as watched, asyncio.TaskGroup() as group:
                streams = Streams(
                    self._media,
                    self._wanted.fps,
                    self._options,
                    self._see_streamed,
                    lambda: self._enqueue(self._frames.end_stream()),
                    self._responses.put_stream,
                    group,
                )
                if self._wanted.source:
                    source = watched.enter_context(self._sources.watched(self._wanted.source_name))
                    self._responses.source = source
                    streams.watch(self._wanted.source, self._wanted.reopens, source)
                for step in (self._read(requests, streams), self._work()):
                    group.create_task(step)
        except ExceptionGroup as failures:
            first = failures.exceptions[0]
            raise (first.error if isinstance(first, SegmentFailed) else first) from None
        except asyncio.CancelledError:
            if self._ended_by:
                raise self._ended_by from None
            raise
        finally:
            self._sessions.remove(self)
            self._engine.close(session.lease)
            self.over.set()
            # Errors refer to the call until garbage is collected: its pictures go now.
            self.give_up_pictures()
            while self._waiting:
                self._waiting.take()

    async def _open(self) -> None:
        while True:
            try:
                await asyncio.wrap_future(self._engine.open(self._session.lease))
                break
            except Overloaded:
                if not await self._sessions.make_way(self.num_blocks):
                    raise
        self._sessions.use(self)

    # --- as `sessions` see it ----------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return self._session.lease.num_blocks

    @property
    def rests(self) -> bool:
        return not (self._waiting or self._serving or self._ended_by)

    def keep_less(self) -> bool:
        return self._writer.window.keep_less()

    def give_up_pictures(self) -> None:
        self._writer.give_up_pictures()
        self._responses.give_up_picture()
        self._responses.count_dropped(self._frames.give_up(), DropReason.NO_ROOM)

    def end(self, error: Exception) -> None:
        self._ended_by = error
        if self._running:
            self._running.cancel()

    # --- what comes --------------------------------------------------------------------------------------------

    async def _read(self, requests: AsyncIterator[LiveRequest], streams: Streams) -> None:
        async for request in requests:
            match kind := request.WhichOneof("request"):
                case "frame" | "clip" if self._kind not in ("", kind):
                    raise InvalidRequest(f"must not be sent: this session's frames come by {self._kind}", field=kind)
                case "frame":
                    self._kind = kind
                    await self._take_frame(request.frame)
                case "clip":
                    self._kind = kind
                    await streams.send_clip(request.clip.data, request.clip.begins)
                case "ask":
                    await streams.caught_up()
                    try:
                        self._asked.append(self._question(request.ask))
                    except (InvalidRequest, Overloaded) as error:
                        await self._responses.finish_without_answer(request.ask.ask_id, error)
                        continue
                    self._waiting.ask(self._asked[-1], self._frames.flush())
                    self._charge_pictures()
                case "cancel":
                    for asked in self._asked:
                        asked.cancelled.set()
                case "close":
                    break
                case other:
                    raise InvalidRequest(f"a live session takes no {other or 'empty request'} after it was opened")
            self._came.set()
            del request  # a session may rest for hours: its last frame is not kept meanwhile
        await streams.close()
        self._closed = True
        self._came.set()

    async def _take_frame(self, frame: generation_pb2.LiveFrame) -> None:
        self._responses.count_frames(1)
        try:
            # Pixels are copied in a thread, so that others run between the copies.
            raw, picture = frame.raw, frame.picture
            if frame.HasField("raw"):
                picture = await asyncio.to_thread(picture_of, raw.width, raw.height, lambda: raw.rgb)
            self._see(picture, frame.time_s)
        except InvalidRequest as error:
            await self._responses.refuse_frames(1, error, self._responses.usage.frames - 1)

    def _see(self, picture: bytes | bytearray, time_s: float, filmed_s: float | None = None) -> None:
        """Takes a frame. Raises InvalidRequest for one that is refused."""
        self._sessions.use(self)
        try:
            pair = self._frames.pair(picture, time_s, self._responses.usage.frames - 1, filmed_s)
        except Overloaded:
            self._responses.count_dropped(1, DropReason.NO_ROOM)
            self._came.set()
            return
        self._enqueue(pair)

    def _see_streamed(self, frame: WatchedFrame, time_s: float) -> None:
        """Takes a frame of a stream."""
        self._responses.count_frames(frame.replaced + 1)
        if frame.replaced:
            self._responses.count_dropped(frame.replaced, DropReason.LATE)
        self._see(frame.picture, time_s, frame.filmed_s)

    def _enqueue(self, pair: FramePair | None) -> None:
        if pair:
            self._waiting.enqueue(pair, answering=isinstance(self._serving, Ask))
            self._charge_pictures()
            self._came.set()

    def _charge_pictures(self) -> None:
        """Charges the client for the slices that wait and for the slice that is being added. Without room, the oldest
        slices that wait are dropped."""
        serving_bytes = self._serving.size_bytes if isinstance(self._serving, FramePair) else 0
        while True:
            held_bytes = self._waiting.size_bytes + serving_bytes
            try:
                self._charge(held_bytes - self._charged_bytes)
            except (InvalidRequest, Overloaded):
                self._responses.count_dropped(self._waiting.take_oldest_slice().used, DropReason.NO_ROOM)
            else:
                self._charged_bytes = held_bytes
                return

    def _question(self, message: generation_pb2.LiveAsk) -> Ask:
        if len(self._asked) > MAX_WAITING_QUESTIONS:
            raise Overloaded(f"{MAX_WAITING_QUESTIONS} questions wait, and no more may", field="ask")
        return ask_of(message)

    async def _work(self) -> None:
        while self._waiting or not self._closed:
            if not self._waiting:
                self._came.clear()
                await self._responses.tell_dropped()
                await self._came.wait()
                continue
            self._serving = work = self._waiting.take()
            await self._serve(work)
            if isinstance(work, Ask):
                self._asked.remove(work)
            self._serving = None
            del work
            self._charge_pictures()
            self._sessions.use(self)
        await self._responses.tell_dropped()

    async def _serve(self, work: FramePair | Ask) -> None:
        """Adds a slice or answers a question. The session goes on without what is refused, or needs a service that
        cannot be reached."""
        try:
            changed = await self._writer.write(work)
        except InvalidRequest as error:
            if isinstance(work, FramePair):
                await self._responses.refuse_frames(work.used, error, _wrong_frame(work, error))
            else:
                await self._responses.finish_without_answer(work.id, error)
        except (Unavailable, Overloaded) as error:
            check_upstream(error)
            if not self._goes_without:
                log.warning("a live session goes on without a service", error=str(error))
            self._goes_without = True
            if isinstance(work, FramePair):
                self._responses.count_dropped(work.used, DropReason.UNAVAILABLE)
                await self._responses.tell_dropped()
            else:
                await self._responses.finish_without_answer(work.id, error)
        else:
            self._goes_without = False
            if isinstance(work, FramePair):
                self._pull_triggers(work.time_us, changed)

    def _pull_triggers(self, time_us: int, changed: float) -> None:
        """Asks what a slice triggers, before what waits."""
        room = MAX_WAITING_QUESTIONS + 1 - len(self._asked)
        for ask in pulled(self._wanted.triggers, time_us, changed, tuple(self._asked), room):
            self._asked.append(ask)
            self._waiting.ask_now(ask)


def _wrong_frame(pair: FramePair, error: InvalidRequest) -> int:
    """The number of the frame for which a slice is refused. Puts LiveFrame's name of its picture into the error."""
    match steps_of(error.field or ""):
        case *_, "pictures", int(place):  # of a prompt whose pictures are those of whole slices
            error.field = "frame.picture"
            return (pair.first if place % SLICE_FRAMES == 0 else pair.last).number
    return pair.last.number
