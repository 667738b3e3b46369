"""What a live session says: its responses in order, and what is counted since it was opened.

It makes the messages; what tells it knows none.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import structlog

from gridsieve.common.contract.errors import GridsieveError, InvalidRequest
from gridsieve.common.contract.plan import Grid, Int32Array
from gridsieve.common.contract.wire import grid_message, int32_tensor
from gridsieve.common.response_queue import ResponseQueue
from gridsieve.common.serving.status import status_message
from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.services.generation.answers.messages import delta_message, finished_message
from gridsieve.services.generation.answers.text import Said
from gridsieve.services.generation.live.ask import Answer
from gridsieve.services.generation.live.frames import DropReason, Frame, FramePair
from gridsieve.services.generation.live.pictures import snapshot_of
from gridsieve.services.generation.live.source_metrics import Source
from gridsieve.services.generation.live.streams import StreamState
from gridsieve.services.generation.request.session import Session
from gridsieve.services.generation.sampling.detokenizer import Tokenizer
from gridsieve.v1 import generation_pb2
from gridsieve.v1.generation_pb2 import (
    SNAPSHOTS_ANSWERS,
    SNAPSHOTS_SLICES,
    WALL_CLOCK_CAMERA,
    WALL_CLOCK_SERVICE,
    LiveResponse,
)

log = structlog.get_logger()


class LiveResponses:
    """queue: the responses. usage: the sums so far, but for the tokens that the session holds.

    snapshots: with which of them a picture comes. source: what is counted of the session's source, if it has one.
    """

    source: Source | None = None

    def __init__(self, session: Session, tokenizer: Tokenizer, snapshots: generation_pb2.Snapshots) -> None:
        self.queue: ResponseQueue[LiveResponse] = ResponseQueue(None)
        self.usage = generation_pb2.LiveUsage()
        self._session, self._tokenizer, self._snapshots = session, tokenizer, snapshots
        self._seen: Frame | None = None  # the last frame of the last slice
        self._dropped: Counter[DropReason] = Counter()  # frames, not yet told

    async def put_accepted(self) -> None:
        """Says that the session is open."""
        reserved_tokens = len(self._session.lease.blocks) * self._session.block_tokens
        accepted = generation_pb2.LiveAccepted(request_id=self._session.id, reserved_tokens=reserved_tokens)
        await self._put(accepted=accepted)

    async def put_stream(self, state: StreamState, reason: str) -> None:
        """Tells of the session's stream. reason: why it is in this state."""
        stream = generation_pb2.LiveStream(state=f"STREAM_STATE_{state.name}", reason=reason)
        await self._put(stream=stream)

    async def put_evicted(self, segments: int, tokens: int) -> None:
        """Counts rows that went, and tells of the segments that did, if there are any."""
        self.usage.evicted_tokens += tokens
        if segments:
            await self._put(evicted=generation_pb2.LiveEvicted(segments=segments, tokens=tokens))

    async def put_restarted(self, segments: int) -> None:
        """Says that the session begins again with so many segments."""
        await self._put(restarted=generation_pb2.LiveRestarted(segments=segments))

    async def put_said(self, ask_id: str, said: Said) -> None:
        """Sends the next part of an answer."""
        delta = delta_message(said, self._tokenizer)
        await self._put(delta=generation_pb2.LiveDelta(ask_id=ask_id, delta=delta))

    async def _put(self, **response: Any) -> None:
        """Sends a response, given as its field of LiveResponse, after what was dropped before it."""
        await self.tell_dropped()
        await self.queue.put(LiveResponse(**response))

    def count_dropped(self, frames: int, reason: DropReason) -> None:
        """Counts frames that were not used. The next response is sent after these numbers."""
        if frames:
            self._dropped[reason] += frames
            self._sum_dropped(frames, reason)

    async def tell_dropped(self) -> None:
        told, self._dropped = self._dropped, Counter()
        for reason, frames in told.items():
            dropped = generation_pb2.LiveDropped(frames=frames, reason=f"DROP_REASON_{reason.name}")
            await self.queue.put(LiveResponse(dropped=dropped))

    def count_frames(self, frames: int) -> None:
        """Counts frames that came."""
        self.usage.frames += frames
        if self.source:
            self.source.count_frames(frames)

    async def put_slice(self, pair: FramePair, grid: Grid, kept: Int32Array) -> None:
        """Counts a slice that was added, and tells of it. grid: its tokens. kept: which of them stayed."""
        self._seen = pair.last if self._snapshots else replace(pair.last, picture=b"")
        self.usage.used_frames += pair.used
        self.usage.media_tokens_full += grid.tokens
        self.usage.media_tokens += kept.size
        add_request_stats(prompt_tokens_full=grid.tokens, prompt_tokens=kept.size)
        if self.source:
            lag_s = (time.monotonic_ns() - pair.last.came_ns) * 1e-9
            self.source.count_slice(lag_s, grid.tokens, kept.size)
        told = generation_pb2.LiveSlice(
            first_time_s=pair.first.given_s,
            last_time_s=pair.last.given_s,
            grid=grid_message(grid),
            kept=int32_tensor(kept),
            usage=self.used(),
            **await self._filmed(SNAPSHOTS_SLICES),
        )
        await self._put(slice=told)

    def give_up_picture(self) -> None:
        """Forgets the last frame's picture: without another slice, there are no snapshots."""
        self._seen = self._seen and replace(self._seen, picture=b"")

    async def refuse_frames(self, frames: int, error: InvalidRequest, number: int) -> None:
        """Says that frames were refused, because of frame `number`. The session goes on."""
        self._sum_dropped(frames, DropReason.REFUSED)
        told = generation_pb2.LiveDropped(
            frames=frames,
            reason=generation_pb2.DROP_REASON_REFUSED,
            error=status_message(error),
            frame=number,
            error_field=error.field,
        )
        await self._put(dropped=told)

    async def finish(self, ask_id: str, answer: Answer | None) -> None:
        """Ends a question. answer: None: it was cancelled before it was computed."""
        finished = generation_pb2.Finished(reason=generation_pb2.FINISH_REASON_CANCELLED)
        if answer:
            self.usage.completion_tokens += answer.completion_tokens
            finished.usage.prompt_tokens_full = finished.usage.prompt_tokens = answer.prompt_tokens
            finished.usage.cached_prompt_tokens = answer.held_tokens
            finished.usage.completion_tokens = answer.completion_tokens
            if answer.ended:
                finished = finished_message(answer.ended, finished.usage, answer.clock)
        reason = generation_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
        tokens = finished.usage.prompt_tokens, finished.usage.completion_tokens
        log.info("answer ended", reason=reason, prompt_tokens=tokens[0], completion_tokens=tokens[1])
        filmed = await self._filmed(SNAPSHOTS_ANSWERS, SNAPSHOTS_SLICES)
        told = generation_pb2.LiveFinished(ask_id=ask_id, finished=finished, usage=self.used(), **filmed)
        await self._put(finished=told)

    async def finish_without_answer(self, ask_id: str, error: GridsieveError) -> None:
        """Ends a question that was refused, or for which a service was missing. The session goes on."""
        refused = isinstance(error, InvalidRequest)
        log.warning("a question was not answered", reason=error.reason, error=status_message(error))
        reason = generation_pb2.FINISH_REASON_REFUSED if refused else generation_pb2.FINISH_REASON_UNAVAILABLE
        told = generation_pb2.LiveFinished(
            ask_id=ask_id,
            finished=generation_pb2.Finished(reason=reason),
            usage=self.used(),
            error=status_message(error),
            error_field=error.field,
            **await self._filmed(SNAPSHOTS_ANSWERS, SNAPSHOTS_SLICES),
        )
        await self._put(finished=told)

    def used(self) -> generation_pb2.LiveUsage:
        """The session so far, in a message of its own."""
        used = generation_pb2.LiveUsage()
        used.CopyFrom(self.usage)
        used.held_tokens = self._session.held
        return used

    def _sum_dropped(self, frames: int, reason: DropReason) -> None:
        self.usage.dropped_frames += frames
        if self.source:
            self.source.count_dropped(frames, reason)

    async def _filmed(self, *snapshots: generation_pb2.Snapshots) -> dict[str, Any]:
        """The fields that say when the last frame was filmed, and show it where one of these snapshots is wanted."""
        if (frame := self._seen) is None:
            return {}
        shown = await asyncio.to_thread(snapshot_of, frame.picture) if self._snapshots in snapshots else b""
        clock = WALL_CLOCK_CAMERA if frame.by_camera else WALL_CLOCK_SERVICE
        return {"wall_time_s": frame.wall_s, "wall_clock": clock, "snapshot": shown}
