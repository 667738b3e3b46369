"""The conversation of a live session: slices and questions become segments of its `Session`, one after the other.

    a slice      plan and pruned tokens from upstream ─▶ make room ─▶ compute its rows
    a question   plan from preprocessing ─▶ compute its rows and the answer
    no room      begin again: the last segments are computed once more, then the new one

It owns the session while that has no request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gridsieve.common.contract.errors import (
    GridsieveError,
    InvalidRequest,
    MediaRejected,
    Overloaded,
    PromptTooLong,
    Unavailable,
)
from gridsieve.common.contract.plan import Grid, PromptPlan
from gridsieve.common.contract.wire import pruning_message
from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.services.generation.engine.engine import Engine
from gridsieve.services.generation.request import live_cuts
from gridsieve.services.generation.request.encoded_media import MediaItem
from gridsieve.services.generation.request.live_cuts import SliceSegment
from gridsieve.services.generation.request.request import Adapter, Event, Failed, Finished, Request
from gridsieve.services.generation.request.session import Segment, Session
from gridsieve.services.generation.rpc.events import Events, Inbox
from gridsieve.services.generation.rpc.live import prompts
from gridsieve.services.generation.rpc.live.frames import Slice
from gridsieve.services.generation.rpc.live.options import NOTHING_PRUNED, Ask, Options
from gridsieve.services.generation.rpc.live.responses import LiveResponses
from gridsieve.services.generation.rpc.live.window import Answered, Numbered, Window
from gridsieve.services.generation.rpc.responses import Responses
from gridsieve.services.generation.rpc.served_model import ServedModel
from gridsieve.services.generation.sampling.banned import spellings
from gridsieve.services.generation.sampling.detokenizer import Detokenizer
from gridsieve.services.generation.sampling.sampler import SamplingParams
from gridsieve.services.generation.stage_clock import Stage, StageClock
from gridsieve.services.generation.upstream.media import MediaClient
from gridsieve.v1 import generation_pb2, prompt_pb2

# Slices of text alone that wait to be computed with what comes next: a forward reads all weights, however few its rows.
MAX_TEXTS = 3
_CANCELLED = generation_pb2.FINISH_REASON_CANCELLED


class SegmentFailed(Exception):
    """The engine could not compute a segment, of which a part may have stayed, so the session cannot go on."""

    def __init__(self, error: GridsieveError) -> None:
        super().__init__(str(error))
        self.error = error


class _Ended(PromptTooLong):
    """A segment does not fit after what the session holds, so the session begins again."""


class _Resized(_Ended):
    """Frames have another size than those before them."""


class Conversation:
    """responses: says what happens. inbox: of the running event loop. options: makes the arguments of an upstream call
    that begins now: what time is left, and metadata.
    """

    def __init__(
        self,
        wanted: Options,
        session: Session,
        responses: LiveResponses,
        engine: Engine,
        media: MediaClient,
        model: ServedModel,
        inbox: Inbox,
        options: Callable[[], dict[str, Any]],
    ) -> None:
        self._wanted, self._session, self._responses = wanted, session, responses
        self._engine, self._media, self._model, self._inbox, self._options = engine, media, model, inbox, options
        self._shown: Slice | None = None  # the last slice of the present turn; None before its first one
        self._cut: SliceSegment | None = None  # of that slice, without its embeddings
        self._still: Slice | None = None  # the last slice after it that shows the same files and added no rows
        self._texts: list[Segment] = []  # slices of text alone that are not computed yet
        self._opening = 0  # rows of text before the first slice, the last time that the session began with one
        self._last_whole = 0  # the last segment whose slice was taken whole
        self._window = Window(session, wanted.window_s, wanted.live.recurrent)

    async def add(self, piece: Slice | Ask) -> float:
        """Adds a slice, or answers a question. Returns the share of the slice's tokens that changed.

        The session begins again before it if it does not fit: with the segments of the window; and if it is too far
        from them, or does not fit beside them, alone.
        Raises InvalidRequest for what is refused, and Unavailable and Overloaded: the session can go on without it.
        Raises SegmentFailed: it cannot.
        """
        try:
            return await self._add(piece)
        except _Resized:
            staying: Sequence[Numbered] = ()
        except _Ended:
            staying = self._window.staying(piece if isinstance(piece, Slice) else None)
        try:
            await self._begin_again(staying)
            return await self._add(piece)
        except _Ended:
            await self._begin_again(())
            return await self._add(piece)

    def keep_less(self) -> bool:
        """Forgets the oldest slice of those to begin again with. Returns whether there was one."""
        return self._window.keep_less()

    def give_up_pictures(self) -> None:
        """Forgets all pictures. Only while nothing is added. Without a reference the next slice is taken whole."""
        while self.keep_less():
            pass
        self._shown, self._still = (each and each.showing(b"", b"") for each in (self._shown, self._still))

    async def _add(self, piece: Slice | Ask) -> float:
        if isinstance(piece, Slice):
            return await self._take_slice(piece)
        await self._answer(piece)
        return 0.0

    # --- beginning again ---------------------------------------------------------------------------------------

    async def _begin_again(self, repeated: Sequence[Numbered]) -> None:
        """Computes these segments again, by number, from position 0 on."""
        session = self._session
        rows = {number: session.rows_of(number) for number, _ in repeated if number < session.count}
        held = session.count - session.first + 1  # segment 0, and those from `first` on
        await self._tell_evicted(held - len(rows), session.held - sum(rows.values()))
        session.forget()
        self._shown, self._still, self._last_whole = None, None, 0
        self._texts.clear()
        self._window.clear()
        await self._responses.put(restarted=generation_pb2.LiveRestarted(segments=len(repeated)))
        lost, stayed = set[int](), set[int]()  # several slices of text alone may be of one segment
        for number, piece in repeated:
            try:
                await (
                    self._take_slice(piece, again=True) if isinstance(piece, Slice) else self._repeat_question(piece)
                )
            except _Ended:
                raise
            except InvalidRequest:
                lost.add(number)
            except (Unavailable, Overloaded) as error:
                check_upstream(error)
                lost.add(number)
            else:
                stayed.add(number)
        await self._tell_evicted(len(lost - stayed), sum(rows.get(number, 0) for number in lost - stayed))

    # --- slices ------------------------------------------------------------------------------------------------

    async def _take_slice(self, piece: Slice, again: bool = False) -> float:
        """Adds a slice. Returns the share of its tokens that changed. again: it was added before, and is not told."""
        try:
            return await self._encode_slice(self._shown, piece, again)
        except MediaRejected as error:
            # A video has frames of one size: the limit of a picture's is the size of those before it.
            if self._shown is None or error.limit is None or ".pictures[" not in (error.field or ""):
                raise
        alone, pictures = prompts.turn_slice(self._before(), piece, self._wanted.max_pixels)
        pruning = pruning_message(NOTHING_PRUNED)
        chosen: dict[str, Any] = {"files": pictures, "replica": self._session.id, **self._options()}
        async with self._media.open(alone, pruning, StageClock(), self._of_media, **chosen) as upstream:
            raise self._resized(upstream.plan.media[-1].grid)

    async def _encode_slice(self, shown: Slice | None, piece: Slice, again: bool) -> float:
        """Adds a slice after another one of its turn; None: it begins one."""
        # Slices build on the last whole one of their stream. It is evicted; segment 0 is not before segment 1 is.
        base_is_gone = self._session.first > max(self._last_whole, 1) or bool(shown and shown.stream != piece.stream)
        cut = self._cut
        reference = cut.reference if cut and not base_is_gone else b""
        if shown and not shown.size_bytes and not reference:  # they were given up, and a whole slice needs their times
            base_is_gone, shown = True, shown.showing(piece.first.picture, piece.last.picture)
        if shown and cut and cut.settled and not base_is_gone and piece.repeats(shown):
            await self._stand_still(shown, cut, piece, again)
            return 0.0
        wanted = NOTHING_PRUNED if base_is_gone else self._wanted.pruning
        if shown is None:
            prompt, pictures = prompts.turn_slice(self._before(), piece, self._wanted.max_pixels)
        else:
            prompt, pictures = prompts.next_slice(shown, piece, self._wanted.max_pixels, alone=bool(reference))
        pruning, clock, options = pruning_message(wanted), StageClock(), self._options()
        select = prompt_pb2.Select()
        if shown and wanted.threshold is not None:
            # The slice before is there for its place alone, or, if it is whole, to be compared with.
            select = prompt_pb2.Select(first_slice=1, reference=reference)
        # Slices meet the replica that has the ones before them in its caches.
        chosen: dict[str, Any] = {"files": pictures, "select": select, "replica": self._session.id}
        async with self._media.open(prompt, pruning, clock, self._of_media, **chosen, **options) as upstream:
            grid = upstream.plan.media[-1].grid
            if shown and cut and (grid.h, grid.w) != (cut.grid.h, cut.grid.w):
                raise self._resized(grid)
            async for received in upstream.receive((0,), clock):
                if isinstance(received, MediaItem) and received.complete:
                    item = received
            if shown and cut:
                cut = live_cuts.next_slice(upstream.plan, item, self._session, cut)
            else:
                cut = live_cuts.turn_slice(upstream.plan, item, self._session, self._model.defaults.eos_ids)
        # Not before the call upstream has ended: to tell of the slice waits for a caller that reads nothing.
        await self._append_slice(piece, cut, whole=base_is_gone or shown is None, again=again)
        return 0.0 if base_is_gone or shown is None else cut.kept.size / cut.grid.tokens

    async def _stand_still(self, shown: Slice, cut: SliceSegment, piece: Slice, again: bool) -> None:
        """Adds a slice that shows the same files as the last one, after which these keep nothing."""
        if cut.segment.ids.size:
            plan = await self._media.plan(prompts.still_slice(shown, piece, cut.grid), **self._options())
            cut = live_cuts.next_slice(plan, None, self._session, cut)
            await self._append_slice(piece, cut, whole=False, again=again)
            return
        self._still = piece
        await self._evict(0, self._window.oldest_beside(piece))
        if not again:
            await self._responses.put_slice(piece, cut.grid, cut.kept)

    async def _append_slice(self, piece: Slice, cut: SliceSegment, whole: bool, again: bool) -> None:
        session, segment = self._session, cut.segment
        if not session.held:
            self._opening = segment.ids.size - cut.kept.size
        self._check_fits(cut.grid.tokens)
        await self._evict(segment.ids.size, self._window.oldest_beside(piece))
        number = session.count
        if segment.ids.size:
            if segment.runs or self._wanted.live.recurrent or len(self._texts) == MAX_TEXTS:
                await self._compute(segment)
            else:
                self._texts.append(segment)
            self._last_whole = number if whole else self._last_whole
            self._window.add(number, piece)
        session.next_position = segment.next_position
        self._shown, self._still = piece, None
        self._cut = replace(cut, segment=replace(segment, embeds=None))
        if not again:
            await self._responses.put_slice(piece, cut.grid, cut.kept)

    def _check_fits(self, tokens: int) -> None:
        """Raises PromptTooLong if a slice of so many tokens is too large for an empty window."""
        if (needed := self._opening + tokens) > (window_tokens := self._session.window_tokens):
            raise PromptTooLong(
                f"the messages before a session's first frame and a slice need {needed} tokens, its window has "
                f"{window_tokens}",
                value=needed,
                limit=window_tokens,
                remedy="raise `window_tokens`, or lower `max_pixels`",
            )

    def _resized(self, grid: Grid) -> _Resized:
        """What to raise before a slice of another grid. Raises PromptTooLong if it could never be added."""
        self._check_fits(grid.slice_tokens)
        return _Resized("the session's frames have another size")

    # --- questions ---------------------------------------------------------------------------------------------

    async def _answer(self, ask: Ask) -> None:
        if ask.cancelled.is_set():
            await self._responses.finish(ask.id, generation_pb2.Finished(reason=_CANCELLED))
            return
        clock, model, session = StageClock(), self._model, self._session
        wanted, grammar = ask.wanted, None
        if wanted.is_constrained:
            grammar = await asyncio.to_thread(model.grammars.compile, wanted.json_schema, wanted.tool_use)
        bad_words = await asyncio.to_thread(spellings, model.tokenizer, wanted.bad_words) if wanted.bad_words else ()
        prompt = prompts.question(self._before(), self._seen(), ask.parts)
        plan = await self._media.plan(prompt, **self._options())
        self._settle_still(plan)
        segment = live_cuts.question(plan, session, model.defaults.eos_ids, ask.transient)
        clock.skip(Stage.FETCH)
        clock.finish(Stage.TRANSFER)
        if ask.cancelled.is_set():
            await self._responses.finish(ask.id, generation_pb2.Finished(reason=_CANCELLED))
            return
        left = session.answer_tokens - segment.ids.size + 1  # the last token of an answer is not computed
        if left < (wanted.max_new_tokens or 1):
            raise PromptTooLong(
                f"a question of {segment.ids.size} tokens and an answer of {wanted.max_new_tokens or 1} exceed "
                f"answer_tokens {session.answer_tokens}",
                value=segment.ids.size + (wanted.max_new_tokens or 1) - 1,
                limit=session.answer_tokens,
            )
        (params,) = wanted.resolve(model.defaults, left, grammar, bad_words)
        await self._evict(0)  # its own rows are among those of `answer_tokens`
        segment = segment.after(self._texts)
        number, held = session.count, session.held
        events = Events(self._inbox, 1)
        detokenizer = Detokenizer(model.tokenizer, params.stop, params.min_new_tokens) if params.stop else None
        question = self._request(segment, params, detokenizer, events.listener(0))
        tokens = question.prompt.tokens
        usage = generation_pb2.Usage(prompt_tokens_full=tokens, prompt_tokens=tokens, cached_prompt_tokens=held)
        self._engine.submit(question)
        add_request_stats(prompt_tokens_full=tokens - held, prompt_tokens=tokens - held)
        try:
            answer, finished = await self._say(ask, Responses(question, 1, usage, clock, model.tokenizer, {}), events)
        except GridsieveError as error:
            raise SegmentFailed(error) from error
        if finished is None:
            await asyncio.wrap_future(self._engine.interrupt(session))
            usage.completion_tokens = len(question.output_ids)
            finished = generation_pb2.Finished(reason=_CANCELLED, usage=usage)
        if session.count > number:
            self._shown = None
            self._texts.clear()
            self._window.add(number, Answered(ask.parts, answer))
        self._responses.usage.completion_tokens += len(question.output_ids)
        await self._responses.finish(ask.id, finished)

    async def _say(self, ask: Ask, responses: Responses, events: Events) -> tuple[str, generation_pb2.Finished | None]:
        """Sends the parts of an answer. Returns its text so far, and how it finished; None if it was cancelled."""
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
                    await self._responses.put(delta=generation_pb2.LiveDelta(ask_id=ask.id, delta=response.delta))
                arrives = asyncio.create_task(events.next())
        finally:
            stop.cancel()
            arrives.cancel()

    async def _repeat_question(self, told: Answered) -> None:
        """Adds a question with its answer."""
        prompt = prompts.told(self._before(), self._seen(), told.parts, told.answer or " ")
        plan = await self._media.plan(prompt, **self._options())
        self._settle_still(plan)
        segment = live_cuts.told(plan, self._session, self._model.defaults.eos_ids)
        await self._evict(max(0, segment.ids.size - self._session.answer_tokens))
        self._window.add(self._session.count, told)
        await self._compute(segment)
        self._shown = None

    # --- both --------------------------------------------------------------------------------------------------

    async def _evict(self, rows: int, oldest: int = 0) -> None:
        """Makes room for rows, and the texts before them. oldest: segments below this number go in any case.

        Raises _Ended if something must go of what a recurrent state has read, or of what stays for ever; of a session
        without rows PromptTooLong.
        """
        session, before = self._session, self._session.first
        needed = session.held + rows
        if self._wanted.live.recurrent and session.held and (oldest or needed > session.window_tokens):
            raise _Ended("the window of the session is full", value=needed, limit=session.window_tokens)
        try:
            gone = session.evict(sum(each.ids.size for each in self._texts) + rows, oldest)
        except PromptTooLong as error:
            if not session.held:
                raise
            raise _Ended("the session's first segment leaves too little room", value=needed) from error
        await self._tell_evicted(session.first - before, gone)

    async def _tell_evicted(self, segments: int, tokens: int) -> None:
        self._responses.usage.evicted_tokens += tokens
        if segments:
            await self._responses.put(evicted=generation_pb2.LiveEvicted(segments=segments, tokens=tokens))

    async def _compute(self, segment: Segment) -> None:
        """Computes a segment that has no answer: the token after it is sampled, and of no use."""
        events = Events(self._inbox, 1)
        segment = segment.after(self._texts)
        self._engine.submit(self._request(segment, SamplingParams(1), None, events.listener(0)))
        while True:
            for _, _, event in await events.next():
                if isinstance(event, Failed):
                    raise SegmentFailed(event.error)
                if isinstance(event, Finished):
                    self._texts.clear()
                    return

    def _request(
        self,
        segment: Segment,
        params: SamplingParams,
        detokenizer: Detokenizer | None,
        on_event: Callable[[Event], None],
    ) -> Request:
        """The request that computes a segment. Raises _Ended beyond the model's positions."""
        session, last = self._session, segment.next_position + params.max_new_tokens
        if last > (trained := self._wanted.live.positions):
            raise _Ended(
                f"a window of the session needs position {last}, the model was trained on {trained}",
                value=last,
                limit=trained,
                remedy="lower `window_tokens`",
            )
        prompt = session.begin(segment, self._model.input.embed_levels)
        keys = (b"",) * len(prompt.plan.media)  # one item at most: all media rows of the segment
        number = f"{session.id}/{session.count}"
        adapter = self._wanted.adapter
        request = Request(number, prompt, keys, params, detokenizer, on_event, adapter, session=session)
        request.embeds = [segment.embeds] * len(keys)
        return request

    def _before(self) -> Sequence[prompt_pb2.Message] | None:
        """The conversation before a turn; None: one that ends with an answer."""
        return None if self._session.held else self._wanted.messages

    def _seen(self) -> list[Slice]:
        """The last slice of the turn, and one that repeats it and added no rows."""
        return [each for each in (self._shown, self._still) if each]

    def _settle_still(self, plan: PromptPlan) -> None:
        """Makes the slice that added no rows the last one of the turn, if there is one: what follows has positions
        after it. plan: has the slices of `_seen`."""
        if self._still and self._cut:
            # The slices of the plan are stand-ins of another size.
            passed = live_cuts.next_slice(plan, None, self._session, self._cut)
            self._cut = replace(passed, grid=self._cut.grid)
            self._session.next_position = passed.segment.next_position
            self._shown, self._still = self._still, None

    @property
    def _of_media(self) -> Adapter | None:
        adapter = self._wanted.adapter
        return adapter if adapter and adapter.in_tower else None


def check_upstream(error: Unavailable | Overloaded) -> None:
    """Raises the error if it is generation's own; else another service cannot be reached, or has no room."""
    if isinstance(error, Unavailable) and error.stage == "generation":
        raise error
