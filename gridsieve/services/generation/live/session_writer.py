"""Writes a live session: slices and questions become segments of its `Session`, one after the other.

    a slice      plan and pruned tokens from upstream ─▶ make room ─▶ compute its rows
    a question   plan from preprocessing ─▶ compute its rows and the answer
    no room      begin again: the last segments are computed once more, then the new one

It owns the session while that has no request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from gridsieve.common.contract.errors import InvalidRequest, MediaRejected, Overloaded, PromptTooLong, Unavailable
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.common.contract.wire import pruning_message
from gridsieve.services.generation.live import prompts
from gridsieve.services.generation.live.ask import Ask
from gridsieve.services.generation.live.frames import FramePair
from gridsieve.services.generation.live.options import NOTHING_PRUNED, Options
from gridsieve.services.generation.live.responses import LiveResponses
from gridsieve.services.generation.live.segments import Segments, SessionFull
from gridsieve.services.generation.live.turn import MAX_TEXTS, Turn
from gridsieve.services.generation.live.window import Answered, Numbered, Window
from gridsieve.services.generation.request import live_cuts
from gridsieve.services.generation.request.encoded_media import MediaItem
from gridsieve.services.generation.request.live_cuts import SliceSegment
from gridsieve.services.generation.request.session import Segment, Session
from gridsieve.services.generation.served_model import ServedModel
from gridsieve.services.generation.stage_clock import Stage, StageClock
from gridsieve.services.generation.upstream.media import MediaCall, MediaClient


class _Resized(SessionFull):
    """Frames have another size than those before them."""


class SessionWriter:
    """responses: says what happens. segments: computes what is written. options: makes the arguments of an upstream
    call that begins now: what time is left, and metadata. window: what it begins again with.
    """

    def __init__(
        self,
        wanted: Options,
        session: Session,
        responses: LiveResponses,
        segments: Segments,
        media: MediaClient,
        model: ServedModel,
        options: Callable[[], dict[str, Any]],
    ) -> None:
        self._wanted, self._session, self._responses, self._segments = wanted, session, responses, segments
        self._media, self._model, self._options = media, model, options
        self._turn = Turn(session)
        self.window = Window(session, wanted.window_s, wanted.live.recurrent)

    async def write(self, work: FramePair | Ask) -> float:
        """Adds a slice, or answers a question. Returns the share of the slice's tokens that changed.

        If the slice or the question does not fit, the session begins again: it forgets all rows, computes the segments
        of the window again, and then this one. If frames have another size, or this one does not fit beside the
        window, the session begins with this one alone.
        Raises InvalidRequest for what is refused, Unavailable and Overloaded: the session can go on. Raises
        SegmentFailed: the session cannot go on.
        """
        try:
            return await self._write(work)
        except _Resized:
            staying: Sequence[Numbered] = ()
        except SessionFull:
            staying = self.window.staying(work if isinstance(work, FramePair) else None)
        try:
            await self._begin_again(staying)
            return await self._write(work)
        except SessionFull:
            await self._begin_again(())
            return await self._write(work)

    def give_up_pictures(self) -> None:
        """Forgets all pictures. Only while nothing is added. Without a reference the next slice is taken whole."""
        while self.window.keep_less():
            pass
        self._turn.give_up_pictures()

    async def _write(self, work: FramePair | Ask) -> float:
        if isinstance(work, FramePair):
            return await self._take_slice(work)
        await self._answer(work)
        return 0.0

    # --- beginning again ---------------------------------------------------------------------------------------

    async def _begin_again(self, repeated: Sequence[Numbered]) -> None:
        """Computes these segments again, by number, from position 0 on."""
        session = self._session
        rows = {number: session.rows_of(number) for number, _ in repeated if number < session.count}
        held = session.count - session.first + 1  # segment 0, and those from `first` on
        await self._responses.put_evicted(held - len(rows), session.held - sum(rows.values()))
        session.forget()
        self._turn.begin_again()
        self.window.clear()
        await self._responses.put_restarted(len(repeated))
        lost, stayed = set[int](), set[int]()  # several slices of text alone may be of one segment
        for number, shown in repeated:
            try:
                if isinstance(shown, FramePair):
                    await self._take_slice(shown, again=True)
                else:
                    await self._repeat_question(shown)
            except SessionFull:
                raise
            except InvalidRequest:
                lost.add(number)
            except (Unavailable, Overloaded) as error:
                check_upstream(error)
                lost.add(number)
            else:
                stayed.add(number)
        await self._responses.put_evicted(len(lost - stayed), sum(rows.get(number, 0) for number in lost - stayed))

    # --- slices ------------------------------------------------------------------------------------------------

    async def _take_slice(self, pair: FramePair, again: bool = False) -> float:
        """Adds a slice. Returns the share of its tokens that changed. again: it was added before, and is not told."""
        try:
            return await self._encode_slice(pair, again)
        except MediaRejected as error:
            # A video has frames of one size: the limit of a picture's is the size of those before it.
            if not self._turn.seen or error.limit is None or ".pictures[" not in (error.field or ""):
                raise
        alone = prompts.turn_slice(self._before(), pair, self._wanted.max_pixels)
        async with self._open(alone, NOTHING_PRUNED) as upstream:
            raise self._resized(upstream.plan.media[-1].grid)

    async def _encode_slice(self, pair: FramePair, again: bool) -> float:
        base = self._turn.base_of(pair)
        shown, cut = base.shown, base.cut
        if shown and cut and base.keeps_nothing_of(pair):
            await self._stand_still(shown, cut, pair, again)
            return 0.0
        wanted = NOTHING_PRUNED if base.is_gone else self._wanted.pruning
        if shown is None:
            prompt = prompts.turn_slice(self._before(), pair, self._wanted.max_pixels)
        else:
            prompt = prompts.next_slice(shown, pair, self._wanted.max_pixels, alone=bool(base.reference))
        chosen: dict[str, Any] = {}
        if shown and wanted.threshold is not None:
            # The slice before is there for its place alone, or, if it is whole, to be compared with.
            chosen = {"first_slice": 1, "reference": base.reference}
        async with self._open(prompt, wanted, **chosen) as upstream:
            grid = upstream.plan.media[-1].grid
            if cut and (grid.h, grid.w) != (cut.grid.h, cut.grid.w):
                raise self._resized(grid)
            async for received in upstream.receive((0,)):
                if isinstance(received, MediaItem) and received.complete:
                    item = received
            if cut:
                cut = live_cuts.next_slice(upstream.plan, item, self._session, cut)
            else:
                cut = live_cuts.turn_slice(upstream.plan, item, self._session, self._model.defaults.eos_ids)
        # Not before the call upstream has ended: to tell of the slice waits for a caller that reads nothing.
        whole = base.is_gone or shown is None
        await self._append_slice(pair, cut, whole, again)
        return 0.0 if whole else cut.kept.size / cut.grid.tokens

    def _open(
        self, announcing: prompts.Announcing, pruning: ItemPruning, **chosen: Any
    ) -> AbstractAsyncContextManager[MediaCall]:
        """Slices meet the replica that has the ones before them in its caches."""
        prompt, pictures = announcing
        told: dict[str, Any] = {"files": pictures, "replica": self._session.id, **self._options(), **chosen}
        return self._media.open(prompt, pruning_message(pruning), StageClock(), self._wanted.adapter, **told)

    async def _stand_still(self, shown: FramePair, cut: SliceSegment, pair: FramePair, again: bool) -> None:
        """Adds a slice that shows the same files as the last one, after which these keep nothing."""
        if cut.segment.ids.size:
            plan = await self._media.plan(prompts.still_slice(shown, pair, cut.grid), **self._options())
            cut = live_cuts.next_slice(plan, None, self._session, cut)
            await self._append_slice(pair, cut, whole=False, again=again)
            return
        self._turn.stand_still(pair)
        await self._evict(0, self.window.oldest_beside(pair))
        if not again:
            await self._responses.put_slice(pair, cut.grid, cut.kept)

    async def _append_slice(self, pair: FramePair, cut: SliceSegment, whole: bool, again: bool) -> None:
        session, turn, segment = self._session, self._turn, cut.segment
        if not session.held:
            self.window.opening = segment.ids.size - cut.kept.size
        self.window.check_fits(cut.grid.tokens)
        await self._evict(segment.ids.size, self.window.oldest_beside(pair))
        number = session.count
        if segment.ids.size:
            if segment.runs or self._wanted.live.recurrent or len(turn.texts) == MAX_TEXTS:
                await self._compute(segment)
            else:
                turn.texts.append(segment)
            self.window.remember(number, pair)
        turn.append(pair, cut, number, whole)
        if not again:
            await self._responses.put_slice(pair, cut.grid, cut.kept)

    def _resized(self, grid: Grid) -> _Resized:
        """What to raise before a slice of another grid. Raises PromptTooLong if it could never be added."""
        self.window.check_fits(grid.slice_tokens)
        return _Resized("the session's frames have another size")

    # --- questions ---------------------------------------------------------------------------------------------

    async def _answer(self, ask: Ask) -> None:
        if ask.cancelled.is_set():
            await self._responses.finish(ask.id, None)
            return
        clock, session, wanted = StageClock(), self._session, ask.wanted
        grammar, bad_words = await self._model.constraints(wanted)
        prompt = prompts.question(self._before(), self._turn.seen, ask.texts)
        plan = await self._media.plan(prompt, **self._options())
        self._turn.settle(plan)
        if thought := self._model.thought_after(plan):
            grammar = await self._model.grammar_after(thought, wanted)
        segment = live_cuts.question(plan, session, self._model.defaults.eos_ids, ask.transient)
        clock.skip(Stage.FETCH)
        clock.finish(Stage.TRANSFER)
        if ask.cancelled.is_set():
            await self._responses.finish(ask.id, None)
            return
        left = session.answer_tokens - segment.ids.size + 1  # the last token of an answer is not computed
        if left < (wanted.max_new_tokens or 1):
            raise PromptTooLong(
                f"a question of {segment.ids.size} tokens and an answer of {wanted.max_new_tokens or 1} exceed "
                f"answer_tokens {session.answer_tokens}",
                value=segment.ids.size + (wanted.max_new_tokens or 1) - 1,
                limit=session.answer_tokens,
            )
        (params,) = wanted.resolve(self._model.defaults, left, grammar, bad_words)
        await self._evict(0)  # its own rows are among those of `answer_tokens`
        number = session.count
        answer = await self._segments.answer(ask, segment.after(self._turn.texts), params, thought, clock)
        if session.count > number:
            self._turn.begin()
            self.window.remember(number, Answered(ask.texts, answer.text, answer.thought))
        await self._responses.finish(ask.id, answer)

    async def _repeat_question(self, told: Answered) -> None:
        """Adds a question with its answer."""
        prompt = prompts.told(self._before(), self._turn.seen, told)
        plan = await self._media.plan(prompt, **self._options())
        self._turn.settle(plan)
        segment = live_cuts.told(plan, self._session, self._model.defaults.eos_ids)
        await self._evict(max(0, segment.ids.size - self._session.answer_tokens))
        self.window.remember(self._session.count, told)
        await self._compute(segment)
        self._turn.begin()

    # --- both --------------------------------------------------------------------------------------------------

    async def _evict(self, rows: int, oldest: int = 0) -> None:
        """Makes room for rows, and the texts before them. oldest: segments below this number go in any case.

        Raises SessionFull if something must go of what a recurrent state has read, or of what stays for ever; of a
        session without rows PromptTooLong.
        """
        session, before = self._session, self._session.first
        needed = session.held + rows
        if self._wanted.live.recurrent and session.held and (oldest or needed > session.window_tokens):
            raise SessionFull("the window of the session is full", value=needed, limit=session.window_tokens)
        try:
            gone = session.evict(self._turn.text_rows + rows, oldest)
        except PromptTooLong as error:
            if not session.held:
                raise
            raise SessionFull("the session's first segment leaves too little room", value=needed) from error
        await self._responses.put_evicted(session.first - before, gone)

    async def _compute(self, segment: Segment) -> None:
        """Computes a segment that has no answer, with the texts before it."""
        await self._segments.compute(segment.after(self._turn.texts))
        self._turn.texts.clear()

    def _before(self) -> prompts.Before:
        """The conversation before a turn; None: one that ends with an answer."""
        return None if self._session.held else self._wanted.messages


def check_upstream(error: Unavailable | Overloaded) -> None:
    """Raises the error if it is generation's own; else another service cannot be reached, or has no room."""
    if isinstance(error, Unavailable) and error.stage == "generation":
        raise error
