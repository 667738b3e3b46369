"""A call of another service that is made again on another replica if it is lost.

    call ─▶ plan ─▶ select ─▶ pieces … lost ─▶ back off ─▶ call ─▶ the same plan ─▶ select the missing ones ─▶ pieces

This module does not know what the pieces are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self, TypeAlias

import grpc
import structlog
from prometheus_client import Counter

from gridsieve.common.affinity import Metadata
from gridsieve.common.channels import end_writing, read_from, write_to
from gridsieve.common.contract.errors import Unavailable
from gridsieve.common.contract.plan import PromptPlan
from gridsieve.common.contract.received import received_plan
from gridsieve.common.contract.wire import Take
from gridsieve.common.handover import Receiver
from gridsieve.common.retries import Attempts, Retries

Call: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"
Selected: TypeAlias = "asyncio.Future[Sequence[int]]"

RETRIES = Counter("gridsieve_upstream_retries_total", "Calls that broke off and were retried", ["stage"])
for each in ("encoder", "preprocessing"):
    RETRIES.labels(each)

log = structlog.get_logger()


class RetriedCall:
    """An Encode or Preprocess call that is started again on another replica if it is lost, by the rules of `retries`.

    method: of the service's stub. requests: the messages to write, given the future of the selected items and the
    address of a receiver of shared memory, empty without one. receiver: makes one for each attempt.
    timeout: in seconds, for all attempts together; None for no limit.
    Entering it as a context makes the first attempt; leaving it cancels the last one.
    """

    def __init__(
        self,
        method: Callable[..., Call],
        requests: Callable[[Selected, bytes], AsyncIterator[Any]],
        retries: Retries,
        timeout: float | None = None,
        metadata: Metadata = (),
        receiver: Callable[[], Receiver | None] = lambda: None,
    ) -> None:
        self._method = method
        self._requests = requests
        self._retries = retries
        self._attempts = Attempts(retries, metadata, timeout)
        self._new_receiver = receiver
        self._answered = False
        self.fetched_ns: int | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel()

    async def plan(self) -> PromptPlan:
        """The prompt's plan. Raises PeerContract, and errors of the service.

        Sets `fetched_ns`, when media given by URL had been fetched, on this host's monotonic clock; None without any.
        """
        while True:
            try:
                plan, fetched_ns = await received_plan(self.read)
            except Unavailable as lost:
                await self._restart(lost)
                continue
            self.fetched_ns = self.fetched_ns or fetched_ns
            return plan

    def select(self, wanted: Sequence[int]) -> None:
        if not self._selected.done():  # cancelled together with a lost call; the next read raises its error
            self._selected.set_result(wanted)

    async def read(self) -> Any:
        """The next message; None at the end of the stream. Raises errors of the service."""
        message = await read_from(self._call, self._retries.stage)
        self._answered = True
        return message

    @property
    def take(self) -> Take | None:
        """Takes an array that the service handed over in shared memory; None if it was not asked to."""
        return self._receiver.take if self._receiver else None

    async def resume(self, lost: Unavailable, plan: PromptPlan, missing: Sequence[int]) -> None:
        """Selects the missing items in a new call. Raises `lost` if no new call can be made or its plan differs."""
        await self._restart(lost)
        again = await self.plan()
        if not again.same_as(plan):
            log.warning("another replica sent a different plan", stage=self._retries.stage)
            raise lost
        self.select(missing)

    def succeeded(self) -> None:
        """Records that everything selected has arrived, so the call will not be retried."""
        self._retries.succeeded()
        del self._requests  # may hold inline media

    def _start(self) -> None:
        self._answered = False
        self._selected: Selected = asyncio.get_running_loop().create_future()
        self._call = self._method(timeout=self._attempts.left_s, metadata=self._attempts.metadata)
        self._receiver = self._new_receiver()
        handover = self._receiver.address if self._receiver else b""
        self._writing = asyncio.create_task(_write_all(self._call, self._requests(self._selected, handover)))

    def _cancel(self) -> None:
        self._call.cancel()
        self._writing.cancel()
        self._selected.cancel()
        if self._receiver:
            self._receiver.close()

    async def _restart(self, lost: Unavailable) -> None:
        await self._attempts.next(lost, self._answered)
        RETRIES.labels(self._retries.stage).inc()
        log.warning("retrying", stage=lost.stage, error=str(lost), attempt=self._attempts.number)
        self._cancel()
        self._start()


async def _write_all(call: Any, requests: AsyncIterator[Any]) -> None:
    """Writes every request of a call. If the call ends first, reading from it raises its error."""
    async for request in requests:
        await write_to(call, request)
    await end_writing(call)
