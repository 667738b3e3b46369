"""The call of a session to generation, GenerationService.Live."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc.aio

from gridsieve.client.client import Metadata
from gridsieve.common.channels import REQUEST_ID_KEY, read_from, write_to
from gridsieve.common.contract.errors import GridsieveError, PeerContract
from gridsieve.services.gateway.http.request_guard import Call
from gridsieve.v1.generation_pb2 import LiveClose, LiveOpen, LiveRequest, LiveResponse
from gridsieve.v1.generation_pb2_grpc import GenerationServiceStub


class Generation:
    """Generation's live sessions. metadata: of calls, beside the caller's."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        self._stub = GenerationServiceStub(channel)
        self._metadata = metadata

    @asynccontextmanager
    async def live(self, call: Call) -> AsyncGenerator[Live]:
        """Ends the session at the end."""
        metadata = ((REQUEST_ID_KEY, call.request_id), *call.metadata, *self._metadata)
        live = Live(self._stub, metadata)
        try:
            yield live
        finally:
            live.cancel()


class Live:
    """At most one call at a time. metadata: of each call."""

    def __init__(self, generation: GenerationServiceStub, metadata: Metadata) -> None:
        self._generation = generation
        self._metadata = metadata
        self._call: Any = None

    async def open(self, message: LiveOpen) -> None:
        """Opens a call, after the one before it has given its memory back: nothing may have been sent on that.

        Raises the GridsieveError with which generation refuses it.
        """
        if self._call is not None:
            try:
                with suppress(GridsieveError):  # it may be lost already
                    await self.close()
                    async for _ in self.responses():
                        pass
            finally:
                self.cancel()
        self._call = self._generation.Live(metadata=self._metadata)
        try:
            await self.send(LiveRequest(open=message))
            accepted = await read_from(self._call, "generation")
            if accepted is None or not accepted.HasField("accepted"):
                raise PeerContract("generation did not accept a live session, and did not refuse it")
        except BaseException:
            self.cancel()
            raise

    async def send(self, request: LiveRequest) -> None:
        """Waits until generation takes it. If the call has ended, `responses` tells why."""
        await write_to(self._call, request, is_large=True)

    async def close(self) -> None:
        """Nothing more is sent: the responses end after those to what was asked."""
        await self.send(LiveRequest(close=LiveClose()))

    async def responses(self) -> AsyncIterator[LiveResponse]:
        """Raises the GridsieveError with which the call ends."""
        while (response := await read_from(self._call, "generation")) is not None:
            yield response

    def cancel(self) -> None:
        """Ends the call, if there is one."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
