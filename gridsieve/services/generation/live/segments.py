"""Computes the segments of a live session, each by a request of the engine, and the answers to its questions."""

from __future__ import annotations

import asyncio

from gridsieve.common.contract.errors import GridsieveError, PromptTooLong
from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.services.generation.answers.events import Events, Inbox
from gridsieve.services.generation.answers.text import Answers, Ended, Said
from gridsieve.services.generation.engine.engine import Engine
from gridsieve.services.generation.live.ask import Answer, Ask
from gridsieve.services.generation.live.options import Options
from gridsieve.services.generation.live.responses import LiveResponses
from gridsieve.services.generation.request.request import Failed, Finished, Request
from gridsieve.services.generation.request.session import Segment, Session
from gridsieve.services.generation.sampling.answer_reader import AnswerReader
from gridsieve.services.generation.sampling.sampler import SamplingParams
from gridsieve.services.generation.sampling.thoughts import Thought
from gridsieve.services.generation.served_model import ServedModel
from gridsieve.services.generation.stage_clock import StageClock


class SegmentFailed(Exception):
    """The engine could not compute a segment, of which a part may have stayed, so the session cannot go on."""

    def __init__(self, error: GridsieveError) -> None:
        super().__init__(str(error))
        self.error = error


class SessionFull(PromptTooLong):
    """A segment does not fit after what the session holds, so the session begins again."""


class Segments:
    """The engine, as one session uses it. inbox: of the running event loop. responses: tell the parts of answers."""

    def __init__(
        self,
        wanted: Options,
        session: Session,
        responses: LiveResponses,
        engine: Engine,
        model: ServedModel,
        inbox: Inbox,
    ) -> None:
        self._wanted, self._session, self._responses = wanted, session, responses
        self._engine, self._model, self._inbox = engine, model, inbox

    async def compute(self, segment: Segment) -> None:
        """Computes a segment that has no answer: the token after it is sampled, and of no use.

        Raises SessionFull beyond the model's positions, and SegmentFailed.
        """
        request, events = self._submit(segment, SamplingParams(1))
        try:
            while True:
                for _, _, event in await events.next():
                    if isinstance(event, Failed):
                        raise SegmentFailed(event.error)
                    if isinstance(event, Finished):
                        return
        finally:
            self._engine.cancel(request)

    async def answer(
        self, ask: Ask, segment: Segment, params: SamplingParams, thought: Thought | None, clock: StageClock
    ) -> Answer:
        """Computes the segment of a question, and its answer until that ends or is cancelled. Raises as `compute`.

        thought: of the answer; None: it has none.
        """
        held, rows = self._session.held, segment.ids.size
        question, events = self._submit(segment, params)
        add_request_stats(prompt_tokens_full=rows, prompt_tokens=rows)
        try:
            readers = [AnswerReader(None, None, thought)] if thought else []
            told = Answers(question, 1, clock, self._model.tokenizer, readers)
            said, ended = await self._say(ask, told, events)
        except GridsieveError as error:
            raise SegmentFailed(error) from error
        finally:
            self._engine.cancel(question)
        if ended is None:
            await asyncio.wrap_future(self._engine.interrupt(question))
        text, thoughts = "".join(each.delta.text for each in said), "".join(each.thought for each in said)
        return Answer(text, thoughts, ended, held + rows, held, len(question.output_ids), clock)

    async def _say(self, ask: Ask, answers: Answers, events: Events) -> tuple[list[Said], Ended | None]:
        """Sends the parts of an answer. Returns these, and how it ended; None if it was cancelled."""
        said = list[Said]()
        stop = asyncio.create_task(ask.cancelled.wait())
        arrives = asyncio.create_task(events.next())
        try:
            while True:
                await asyncio.wait((stop, arrives), return_when=asyncio.FIRST_COMPLETED)
                if not arrives.done():
                    return said, None
                for told in answers.of(arrives.result()):
                    if isinstance(told, Ended):
                        return said, told
                    if isinstance(told, Said):
                        said.append(told)
                        await self._responses.put_said(ask.id, told)
                arrives = asyncio.create_task(events.next())
        finally:
            stop.cancel()
            arrives.cancel()

    def _submit(self, segment: Segment, params: SamplingParams) -> tuple[Request, Events]:
        """The request that computes a segment, and its events. Raises SessionFull beyond the model's positions."""
        session, last = self._session, segment.next_position + params.max_new_tokens
        if last > (trained := self._wanted.live.positions):
            raise SessionFull(
                f"a window of the session needs position {last}, the model was trained on {trained}",
                value=last,
                limit=trained,
                remedy="lower `window_tokens`",
            )
        prompt = session.begin(segment, self._model.input.embed_levels)
        keys = (b"",) * len(prompt.plan.media)  # one item at most: all media rows of the segment
        events = Events(self._inbox, 1)
        request = Request(
            f"{session.id}/{session.count}",
            prompt,
            keys,
            params,
            self._model.stop_finder(params),
            events.listener(0),
            self._wanted.adapter,
            holding=session.borrowed(),
        )
        request.embeds = [segment.embeds] * len(keys)
        try:
            self._engine.submit(request)
        except BaseException:
            session.end(0, ())
            raise
        return request, events
