"""One request's call upstream, begun anew on another replica where it is lost before all that it asks for is there.

    begin ─▶ plan ─▶ select ─▶ pieces … lost ─▶ wait ─▶ begin ─▶ the same plan ─▶ select what is missing ─▶ pieces

It knows plans, and nothing of what is selected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from time import monotonic_ns
from typing import Any, TypeAlias

import grpc
import structlog

from common.channels import end_writing, read_from, write_to
from common.contract.errors import DeadlinePassed, PeerContract, Unavailable
from common.contract.plan import PromptPlan
from common.contract.wire import PlanReceiver, from_ago_s
from common.serving.retries import Retries

Call: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"
Selected: TypeAlias = "asyncio.Future[Sequence[int]]"

log = structlog.get_logger()


class Upstream:
    """A call of Encode or Preprocess to the service named `stage`, until `cancel`, which must be called.

    method: of the service's stub. requests: what the call says, given what is selected once that is known.
    timeout: seconds for all attempts together; None: as long as it takes.
    """

    def __init__(
        self,
        method: Callable[..., Call],
        requests: Callable[[Selected], AsyncIterator[Any]],
        stage: str,
        retries: Retries,
        timeout: float | None = None,
        metadata: Any = None,
    ) -> None:
        self._method = method
        self._requests = requests
        self._stage = stage
        self._retries = retries
        self._clock = asyncio.get_running_loop().time
        self._ends_s = None if timeout is None else self._clock() + timeout
        self._metadata = metadata
        self._attempt = 0
        self._answered = False
        self.fetched_ns: int | None = None
        self._begin()

    async def plan(self) -> PromptPlan:
        """The prompt's. Raises PeerContract, and what the service raises.

        `fetched_ns` then says when media that came by URL had been fetched, on this host's monotonic clock.
        """
        while True:
            try:
                return await self._receive_plan()
            except Unavailable as lost:
                await self._begin_anew(lost)

    def select(self, wanted: Sequence[int]) -> None:
        if not self._selected.done():  # it is cancelled with a call that was lost, as reading will tell
            self._selected.set_result(wanted)

    async def read(self) -> Any:
        """The next message; None where the stream has ended. Raises what the service raises."""
        message = await read_from(self._call, self._stage)
        self._answered = True
        return message

    async def resume(self, lost: Unavailable, plan: PromptPlan, missing: Sequence[int]) -> None:
        """Selects what is missing in another call, whose plan must be the same. Raises `lost` if there is none."""
        await self._begin_anew(lost)
        again = await self.plan()
        if not again.same_as(plan):
            log.warning("another replica plans otherwise", stage=self._stage)
            raise lost
        self.select(missing)

    def succeeded(self) -> None:
        """All that was asked for has come: it will not be begun anew."""
        self._retries.succeeded()
        del self._requests  # media may be in them

    def cancel(self) -> None:
        self._call.cancel()
        self._saying.cancel()
        self._selected.cancel()

    def _begin(self) -> None:
        timeout = None if self._ends_s is None else max(0.0, self._ends_s - self._clock())
        self._attempt += 1
        self._answered = False
        self._selected: Selected = asyncio.get_running_loop().create_future()
        self._call = self._method(timeout=timeout, metadata=self._metadata)
        self._saying = asyncio.create_task(_say(self._call, self._requests(self._selected)))

    async def _begin_anew(self, lost: Unavailable) -> None:
        """Only what had answered: before, gRPC has tried it again already."""
        if self._ends_s is not None and self._clock() >= self._ends_s:  # of calls being written to gRPC may not say so
            raise DeadlinePassed(f"the deadline passed while {self._stage} was at work") from lost
        if not self._answered:
            raise lost
        self.cancel()
        await self._retries.wait(self._attempt + 1, lost)
        log.warning("retrying", stage=lost.stage, error=str(lost), attempt=self._attempt + 1)
        self._begin()

    async def _receive_plan(self) -> PromptPlan:
        receiver = PlanReceiver()
        while True:
            response = await self.read()
            if response is None:
                raise PeerContract("the stream ended before its plan was complete")
            if not response.HasField("plan"):
                raise PeerContract("the stream did not begin with a plan")
            if self.fetched_ns is None and response.HasField("fetched_ago_s"):
                self.fetched_ns = from_ago_s(response.fetched_ago_s, monotonic_ns())
            if plan := receiver.add(response.plan):
                return plan


async def _say(call: Any, requests: AsyncIterator[Any]) -> None:
    """Writes all that a call says. Where it ends before, reading tells how."""
    async for request in requests:
        await write_to(call, request)
    await end_writing(call)
