"""What a live session says: its responses in order, and what is counted since it was opened."""

from __future__ import annotations

from collections import Counter
from typing import Any

from framesieve.common.contract.errors import FramesieveError, InvalidRequest
from framesieve.common.response_queue import ResponseQueue
from framesieve.common.serving.status import status_message
from framesieve.services.generation.request.session import Session
from framesieve.v1 import generation_pb2
from framesieve.v1.generation_pb2 import LiveResponse


class LiveResponses:
    """queue: the responses. usage: the sums so far, but for the tokens that the session holds."""

    def __init__(self, session: Session) -> None:
        self.queue: ResponseQueue[LiveResponse] = ResponseQueue(None)
        self.usage = generation_pb2.LiveUsage()
        self._session = session
        self._dropped: Counter[generation_pb2.DropReason] = Counter()  # frames, not yet told

    async def put(self, **response: Any) -> None:
        """Sends a response, given as its field of LiveResponse, after what was dropped before it."""
        await self.tell_dropped()
        await self.queue.put(LiveResponse(**response))

    def count_dropped(self, frames: int, reason: generation_pb2.DropReason) -> None:
        """Counts frames that were not used. The next response is sent after these numbers."""
        if frames:
            self._dropped[reason] += frames
        self.usage.dropped_frames += frames

    async def tell_dropped(self) -> None:
        told, self._dropped = self._dropped, Counter()
        for reason, frames in told.items():
            await self.queue.put(LiveResponse(dropped=generation_pb2.LiveDropped(frames=frames, reason=reason)))

    async def refuse_frames(self, frames: int, error: InvalidRequest, number: int) -> None:
        """Says that frames were refused, because of the one of this number. The session goes on."""
        self.usage.dropped_frames += frames
        told = generation_pb2.LiveDropped(
            frames=frames,
            reason=generation_pb2.DROP_REASON_REFUSED,
            error=status_message(error),
            frame=number,
            error_field=error.field,
        )
        await self.put(dropped=told)

    async def finish(self, ask_id: str, finished: generation_pb2.Finished) -> None:
        """Ends a question."""
        await self.put(finished=generation_pb2.LiveFinished(ask_id=ask_id, finished=finished, usage=self.used()))

    async def finish_without_answer(self, ask_id: str, error: FramesieveError) -> None:
        """Ends a question that was refused, or for which a service was missing. The session goes on."""
        refused = isinstance(error, InvalidRequest)
        reason = generation_pb2.FINISH_REASON_REFUSED if refused else generation_pb2.FINISH_REASON_UNAVAILABLE
        told = generation_pb2.LiveFinished(
            ask_id=ask_id,
            finished=generation_pb2.Finished(reason=reason),
            usage=self.used(),
            error=status_message(error),
            error_field=error.field,
        )
        await self.put(finished=told)

    def used(self) -> generation_pb2.LiveUsage:
        """The session so far, in a message of its own."""
        used = generation_pb2.LiveUsage()
        used.CopyFrom(self.usage)
        used.held_tokens = self._session.held
        return used
