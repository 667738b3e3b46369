"""One live session: its frames become slices and its questions answers, in the order in which they came.

    read    frame frame │ frame frame │ ask │ frame …          never waits, so that the newest frame is known
    work    encode and compute a slice │ the next one │ answer the question │ …

It owns the session while that has no request, the order of responses, and what is counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from framesieve.common.contract.errors import FramesieveError, InvalidRequest, Overloaded, PromptTooLong, Unavailable
from framesieve.common.contract.wire import grid_message, int32_tensor, pruning_message
from framesieve.common.response_queue import ResponseQueue
from framesieve.common.serving.status import status_message
from framesieve.services.generation.engine.engine import Engine
from framesieve.services.generation.request import live_cuts
from framesieve.services.generation.request.encoded_media import MediaItem
from framesieve.services.generation.request.live_cuts import SliceSegment
from framesieve.services.generation.request.request import Adapter, Event, Failed, Finished, Request
from framesieve.services.generation.request.session import Segment
from framesieve.services.generation.rpc.events import Events, Inbox
from framesieve.services.generation.rpc.live import prompts
from framesieve.services.generation.rpc.live.frames import Frames, Slice, Waiting
from framesieve.services.generation.rpc.live.options import NOTHING_PRUNED, Ask, Options
from framesieve.services.generation.rpc.live.raw_frame import picture_of
from framesieve.services.generation.rpc.live.streams import Streams
from framesieve.services.generation.rpc.live.triggers import Triggers
from framesieve.services.generation.rpc.responses import Responses
from framesieve.services.generation.rpc.served_model import ServedModel
from framesieve.services.generation.sampling.banned import spellings
from framesieve.services.generation.sampling.detokenizer import Detokenizer
from framesieve.services.generation.sampling.sampler import SamplingParams
from framesieve.services.generation.stage_clock import Stage, StageClock
from framesieve.services.generation.upstream.media import MediaClient
from framesieve.v1 import generation_pb2, prompt_pb2
from framesieve.v1.generation_pb2 import LiveRequest, LiveResponse

MAX_WAITING_QUESTIONS = 16
# With how many of its last segments a session begins again. Their pictures stay on the host.
MAX_REPEATED = 32
_CANCELLED = generation_pb2.FINISH_REASON_CANCELLED

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Told:
    """A question that was answered."""

    parts: Sequence[prompt_pb2.Part]
    answer: str


class _PositionsEnded(PromptTooLong):
    """A segment would pass the positions that the model was trained on."""


class LiveCall:
    """Serves one Live call. Raises InvalidRequest for what its `open` must not say.

    options: of upstream calls that begin now.
    """

    def __init__(
        self,
        opened: generation_pb2.LiveOpen,
        request_id: str,
        engine: Engine,
        media: MediaClient,
        model: ServedModel,
        inbox: Inbox,
        options: Callable[[], dict[str, Any]],
    ) -> None:
        self.responses: ResponseQueue[LiveResponse] = ResponseQueue(None)
        self._engine, self._media, self._model, self._inbox, self._options = engine, media, model, inbox, options
        self._wanted = Options.of(opened, model)
        self._session = self._wanted.session(request_id)
        self._frames = Frames(self._wanted.fps)
        self._waiting: Waiting[Ask] = Waiting(lambda late: self._drop(late, generation_pb2.DROP_REASON_LATE))
        self._asked: list[Ask] = []  # questions that are not finished, in order
        self._triggers = Triggers(self._wanted.triggers)
        self._came, self._closed = asyncio.Event(), False
        self._kind = "source" if self._wanted.source else ""  # of what brings its frames; empty: nothing has yet
        self._shown: Slice | None = None  # the last slice of the present turn; None before its first one
        self._place = np.zeros(3, np.int32)  # of that slice, see `live_cuts.SliceSegment`
        self._whole = 0  # the last segment whose slice was taken whole
        self._times: deque[tuple[int, float]] = deque()  # segment and time of each slice that is not too old
        self._window: deque[tuple[int, Slice | _Told]] = deque(maxlen=MAX_REPEATED)  # the last segments, by number
        self._dropped: Counter[generation_pb2.DropReason] = Counter()  # frames, not yet told
        self._usage = generation_pb2.LiveUsage()

    async def run(self, requests: AsyncIterator[LiveRequest]) -> None:
        """Serves the session until it is closed and everything that was asked is answered; then its blocks are free."""
        session = self._session
        try:
            await asyncio.wrap_future(self._engine.open(session))
            reserved = len(session.blocks) * session.block_tokens
            await self._put(accepted=generation_pb2.LiveAccepted(request_id=session.id, reserved_tokens=reserved))
            async with asyncio.TaskGroup() as group:
                streams = Streams(self._media, self._wanted.fps, self._options, self._see, self._put, group)
                if self._wanted.source:
                    streams.watch(self._wanted.source)
                for step in (self._read(requests, streams), self._work()):
                    group.create_task(step)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self._engine.close(session)

    # --- what came ---------------------------------------------------------------------------------------------

    async def _read(self, requests: AsyncIterator[LiveRequest], streams: Streams) -> None:
        async for request in requests:
            match kind := request.WhichOneof("request"):
                case "frame" | "clip" if self._kind not in ("", kind):
                    raise InvalidRequest(f"must not be sent: this session's frames come by {self._kind}", field=kind)
                case "frame":
                    self._kind = kind
                    try:
                        self._see(picture_of(request.frame), request.frame.time_s)
                    except InvalidRequest as error:
                        await self._refuse_frames(1, error)
                        continue
                case "clip":
                    self._kind = kind
                    await streams.add(request.clip)
                case "ask":
                    await streams.caught_up()
                    try:
                        self._asked.append(self._question(request.ask))
                    except (InvalidRequest, Overloaded) as error:
                        await self._refuse(request.ask.ask_id, error)
                        continue
                    self._waiting.ask(self._asked[-1], self._frames.flush())
                case "cancel":
                    for asked in self._asked:
                        asked.cancelled.set()
                case "close":
                    break
                case other:
                    raise InvalidRequest(f"a live session takes no {other or 'empty request'} after it was opened")
            self._came.set()
        await streams.close()
        self._closed = True
        self._came.set()

    def _see(self, picture: bytes, time_s: float, replaced: int = 0) -> None:
        """Takes a frame. replaced: frames that were left out before it, because newer ones came."""
        if replaced:
            self._count_dropped(replaced, generation_pb2.DROP_REASON_LATE)
            self._frames.came += replaced
        if piece := self._frames.add(picture, time_s):
            self._waiting.add(piece)
            self._came.set()

    def _question(self, message: generation_pb2.LiveAsk) -> Ask:
        if len(self._asked) > MAX_WAITING_QUESTIONS:
            raise Overloaded(f"{MAX_WAITING_QUESTIONS} questions wait, and no more may", field="ask")
        return Ask.of(message)

    async def _work(self) -> None:
        while self._waiting or not self._closed:
            if not self._waiting:
                self._came.clear()
                await self._came.wait()
                continue
            piece = self._waiting.take()
            try:
                await self._serve(piece)
            except _PositionsEnded:
                await self._begin_again(piece)
            except InvalidRequest as error:
                if isinstance(piece, Ask):
                    await self._refuse(piece.id, error)
                else:
                    await self._refuse_frames(piece.used, error)
            if isinstance(piece, Ask):
                self._asked.remove(piece)
        await self._tell_dropped()

    async def _serve(self, piece: Slice | Ask) -> None:
        await (self._watch(piece) if isinstance(piece, Slice) else self._answer(piece))

    async def _begin_again(self, piece: Slice | Ask) -> None:
        """Computes the segments of the window again, from position 0 on, and then a piece.

        If that is too far from them, it begins with the piece alone.
        """
        first = self._session.first
        repeated = [each for number, each in self._window if number >= first or first == 1]
        try:
            await self._repeat(repeated)
            await self._serve(piece)
        except _PositionsEnded:
            await self._repeat(())
            await self._serve(piece)

    async def _repeat(self, repeated: Sequence[Slice | _Told]) -> None:
        self._session.forget()
        self._shown, self._whole = None, 0
        self._times.clear()
        self._window.clear()
        await self._put(restarted=generation_pb2.LiveRestarted(segments=len(repeated)))
        for piece in repeated:
            if isinstance(piece, Slice):
                await self._watch(piece, again=True)
            else:
                await self._tell(piece)

    # --- slices ------------------------------------------------------------------------------------------------

    async def _watch(self, piece: Slice, again: bool = False) -> None:
        """Adds a slice. If a service upstream cannot be reached, it is dropped, and the session goes on.

        again: it was added before, and is not counted.
        """
        stale = self._session.first > max(self._whole, 1)
        if self._shown is None:
            prompt = prompts.first_slice(self._before(), piece, self._wanted.max_pixels)
        else:
            prompt = prompts.next_slice(self._shown, piece, self._wanted.max_pixels)
        pruning = pruning_message(NOTHING_PRUNED if stale else self._wanted.pruning)
        clock = StageClock()
        try:
            async with self._media.open(prompt, pruning, clock, self._of_media, **self._options()) as upstream:
                async for received in upstream.receive((0,), clock):
                    if isinstance(received, MediaItem) and received.complete:
                        item = received
                if self._shown is None:
                    cut = live_cuts.first_slice(upstream.plan, item, self._session, self._model.defaults.eos_ids)
                else:
                    cut = live_cuts.next_slice(upstream.plan, item, self._session, self._place)
                await self._add(piece, cut, whole=stale or self._shown is None, again=again)
        except (Unavailable, Overloaded) as error:
            if isinstance(error, Unavailable) and error.stage == "generation":
                raise
            log.warning("frames of a live session were lost", error=str(error))
            if not again:
                self._drop(piece, generation_pb2.DROP_REASON_UNAVAILABLE)
                await self._tell_dropped()

    async def _add(self, piece: Slice, cut: SliceSegment, whole: bool, again: bool) -> None:
        session, segment = self._session, cut.segment
        oldest = 0
        while self._times and self._times[0][1] < piece.last.time_s - self._wanted.window_s:
            oldest = self._times.popleft()[0] + 1
        await self._evict(segment.ids.size, oldest)
        if segment.ids.size:
            number = session.count
            await self._compute(segment)
            self._whole = number if whole else self._whole
            self._times.append((number, piece.last.time_s))
            self._window.append((number, piece))
        else:  # nothing changed, and no text stands between slices
            session.next_position = segment.next_position
        self._shown, self._place = piece, cut.place
        if again:
            return
        self._usage.used_frames += piece.used
        self._usage.media_tokens_full += cut.grid.tokens
        self._usage.media_tokens += cut.kept.size
        told = generation_pb2.LiveSlice(
            first_time_s=piece.first.given_s,
            last_time_s=piece.last.given_s,
            grid=grid_message(cut.grid),
            kept=int32_tensor(cut.kept),
            usage=self._used(),
        )
        await self._put(slice=told)
        changed = 0.0 if whole else cut.kept.size / cut.grid.tokens
        room = MAX_WAITING_QUESTIONS + 1 - len(self._asked)
        for ask in self._triggers.pulled(piece.last.time_s, changed, tuple(self._asked), room):
            self._asked.append(ask)
            self._waiting.ask_now(ask)

    async def _evict(self, rows: int, oldest: int = 0) -> None:
        """Makes room for rows. oldest: segments below this number go in any case."""
        before = self._session.first
        gone = self._session.evict(rows, oldest)
        self._usage.evicted_tokens += gone
        if segments := self._session.first - before:
            await self._put(evicted=generation_pb2.LiveEvicted(segments=segments, tokens=gone))

    async def _compute(self, segment: Segment) -> None:
        """Computes a segment that has no answer: the token after it is sampled, and of no use."""
        events = Events(self._inbox, 1)
        self._engine.submit(self._request(segment, SamplingParams(1), None, events.listener(0)))
        while True:
            for _, _, event in await events.next():
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Finished):
                    return

    # --- questions ---------------------------------------------------------------------------------------------

    async def _answer(self, ask: Ask) -> None:
        clock, model, session = StageClock(), self._model, self._session
        wanted, grammar = ask.wanted, None
        if wanted.is_constrained:
            grammar = await asyncio.to_thread(model.grammars.compile, wanted.json_schema, wanted.tool_use)
        bad_words = await asyncio.to_thread(spellings, model.tokenizer, wanted.bad_words) if wanted.bad_words else ()
        prompt = prompts.question(self._before(), self._shown, ask.parts, self._wanted.max_pixels)
        pruning = pruning_message(NOTHING_PRUNED)
        async with self._media.open(prompt, pruning, clock, self._of_media, **self._options()) as upstream:
            segment = live_cuts.question(upstream.plan, session, model.defaults.eos_ids, ask.transient)
        clock.skip(Stage.TRANSFER)
        if ask.cancelled.is_set():
            await self._finish(ask, generation_pb2.Finished(reason=_CANCELLED))
            return
        left = session.answer_tokens - segment.ids.size + 1
        if left < (wanted.max_new_tokens or 1):
            raise PromptTooLong(
                f"a question of {segment.ids.size} tokens and an answer of {wanted.max_new_tokens or 1} exceed "
                f"answer_tokens {session.answer_tokens}",
                value=segment.ids.size + (wanted.max_new_tokens or 1) - 1,
                limit=session.answer_tokens,
            )
        (params,) = wanted.resolve(model.defaults, left, grammar, bad_words)
        await self._evict(0)
        number, held = session.count, session.held
        events = Events(self._inbox, 1)
        detokenizer = Detokenizer(model.tokenizer, params.stop, params.min_new_tokens) if params.stop else None
        question = self._request(segment, params, detokenizer, events.listener(0))
        question.cached_tokens = held
        tokens = question.prompt.tokens
        usage = generation_pb2.Usage(prompt_tokens_full=tokens, prompt_tokens=tokens, cached_prompt_tokens=held)
        self._engine.submit(question)
        answer, finished = await self._say(ask, Responses(question, 1, usage, clock, model.tokenizer, {}), events)
        if finished is None:
            await asyncio.wrap_future(self._engine.interrupt(session))
            usage.completion_tokens = len(question.output_ids)
            finished = generation_pb2.Finished(reason=_CANCELLED, usage=usage)
        if session.count > number:
            self._shown = None
            self._window.append((number, _Told(ask.parts, answer)))
        self._usage.completion_tokens += len(question.output_ids)
        await self._finish(ask, finished)

    async def _say(self, ask: Ask, responses: Responses, events: Events) -> tuple[str, generation_pb2.Finished | None]:
        """Sends the parts of an answer until it is finished, and returns its text; None if it is cancelled before."""
        text = ""
        stop = asyncio.create_task(ask.cancelled.wait())
        arrives = asyncio.create_task(events.next())
        try:
            while True:
                await asyncio.wait((stop, arrives), return_when=asyncio.FIRST_COMPLETED)
                if not arrives.done():
                    return text, None
                for response in responses.of(arrives.result()):
                    if response.HasField("finished"):
                        return text, response.finished
                    text += response.delta.text
                    await self._put(delta=generation_pb2.LiveDelta(ask_id=ask.id, delta=response.delta))
                arrives = asyncio.create_task(events.next())
        finally:
            stop.cancel()
            arrives.cancel()

    async def _tell(self, told: _Told) -> None:
        """Adds a question with its answer."""
        prompt = prompts.told(self._before(), self._shown, told.parts, told.answer or " ", self._wanted.max_pixels)
        options, pruning = self._options(), pruning_message(NOTHING_PRUNED)
        async with self._media.open(prompt, pruning, StageClock(), self._of_media, **options) as upstream:
            segment = live_cuts.told(upstream.plan, self._session, self._model.defaults.eos_ids)
        await self._evict(0)
        self._window.append((self._session.count, told))
        await self._compute(segment)
        self._shown = None

    async def _finish(self, ask: Ask, finished: generation_pb2.Finished) -> None:
        await self._put(finished=generation_pb2.LiveFinished(ask_id=ask.id, finished=finished, usage=self._used()))

    # --- both --------------------------------------------------------------------------------------------------

    def _request(
        self,
        segment: Segment,
        params: SamplingParams,
        detokenizer: Detokenizer | None,
        on_event: Callable[[Event], None],
    ) -> Request:
        """The request that computes a segment. Raises _PositionsEnded beyond those of the model."""
        session, last = self._session, segment.next_position + params.max_new_tokens
        if last > (trained := self._wanted.live.positions):
            raise _PositionsEnded(
                f"a window of the session needs position {last}, the model was trained on {trained}",
                value=last,
                limit=trained,
                remedy="lower `window_tokens`",
            )
        prompt = session.begin(segment, self._model.input.embed_levels)
        keys = (b"",) * len(prompt.plan.media)
        number = f"{session.id}/{session.count}"
        request = Request(number, prompt, keys, params, detokenizer, on_event, self._wanted.adapter, session)
        request.embeds = [segment.embeds] * len(keys)
        return request

    def _before(self) -> Sequence[prompt_pb2.Message] | None:
        """The conversation before a turn; None: one that ends with an answer."""
        return None if self._session.held else self._wanted.messages

    @property
    def _of_media(self) -> Adapter | None:
        adapter = self._wanted.adapter
        return adapter if adapter and adapter.in_tower else None

    async def _refuse(self, ask_id: str, error: FramesieveError) -> None:
        """Ends a question without an answer. The session goes on."""
        finished = generation_pb2.Finished(reason=generation_pb2.FINISH_REASON_REFUSED)
        told = generation_pb2.LiveFinished(
            ask_id=ask_id, finished=finished, usage=self._used(), error=status_message(error), error_field=error.field
        )
        await self._put(finished=told)

    async def _refuse_frames(self, frames: int, error: InvalidRequest) -> None:
        """Goes on without frames."""
        self._usage.dropped_frames += frames
        refused = generation_pb2.DROP_REASON_REFUSED
        await self._put(dropped=generation_pb2.LiveDropped(frames=frames, reason=refused, error=status_message(error)))

    def _drop(self, late: Slice, reason: generation_pb2.DropReason) -> None:
        self._count_dropped(late.used, reason)

    def _count_dropped(self, frames: int, reason: generation_pb2.DropReason) -> None:
        self._dropped[reason] += frames
        self._usage.dropped_frames += frames

    async def _tell_dropped(self) -> None:
        told, self._dropped = self._dropped, Counter()
        for reason, frames in told.items():
            await self.responses.put(LiveResponse(dropped=generation_pb2.LiveDropped(frames=frames, reason=reason)))

    async def _put(self, **response: Any) -> None:
        await self._tell_dropped()
        await self.responses.put(LiveResponse(**response))

    def _used(self) -> generation_pb2.LiveUsage:
        """The session so far, in a message of its own."""
        self._usage.frames, self._usage.held_tokens = self._frames.came, self._session.held
        used = generation_pb2.LiveUsage()
        used.CopyFrom(self._usage)
        return used
