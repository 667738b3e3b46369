"""What each client may have running at a time: so many requests, so many bytes of request messages.

A client is whose token a request shows, else whose certificate, else the address that it comes from; all who call over
a unix socket are one. Whoever has nothing running is not remembered.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc
import structlog

from common.contract.errors import InvalidRequest, Overloaded

Behaviour: TypeAlias = Callable[[Any, Any], AsyncGenerator[Any]]
Charge: TypeAlias = Callable[[int], None]


@dataclass(slots=True)
class _Account:
    requests: int = 0
    size_bytes: int = 0


class ClientBudgets:
    """max_requests, max_bytes: of each client; None: as many as come."""

    def __init__(self, max_requests: int | None = None, max_bytes: int | None = None) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._accounts: dict[str, _Account] = {}

    @property
    def clients(self) -> int:
        """How many have something running."""
        return len(self._accounts)

    def limited(self, behaviour: Behaviour) -> Behaviour:
        """The same behaviour within its client's budget; requests are still bytes, and each counts as it arrives."""

        async def limited(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[Any]:
            with self.request(client_of(context)) as charge:
                async with aclosing(behaviour(_Charged(context, charge), context)) as responses:
                    async for response in responses:
                        yield response

        return limited

    @contextmanager
    def request(self, client: str) -> Iterator[Charge]:
        """One more request of this client's, while the context lasts; what is yielded takes the size of its messages.

        Raises Overloaded where that is one too many or, when charged, too many bytes, and InvalidRequest for a request
        that has too many by itself.
        """
        account = self._accounts.get(client, _Account())
        if self._max_requests is not None and account.requests >= self._max_requests:
            raise Overloaded(
                f"{client} has {account.requests} requests running, --max-requests-per-client is {self._max_requests}"
            )
        self._accounts[client] = account
        account.requests += 1
        charged_bytes = 0

        def charge(size_bytes: int) -> None:
            nonlocal charged_bytes
            self._check(client, charged_bytes + size_bytes, account.size_bytes - charged_bytes)
            charged_bytes += size_bytes
            account.size_bytes += size_bytes

        try:
            yield charge
        finally:
            account.requests -= 1
            account.size_bytes -= charged_bytes
            if not account.requests:
                del self._accounts[client]

    def _check(self, client: str, own_bytes: int, others_bytes: int) -> None:
        """own_bytes: of the request; others_bytes: of the client's others."""
        if self._max_bytes is None:
            return
        if own_bytes > self._max_bytes:
            raise InvalidRequest(f"the request has {own_bytes} bytes, --max-bytes-per-client is {self._max_bytes}")
        if own_bytes + others_bytes > self._max_bytes:
            raise Overloaded(
                f"{client} has requests of {others_bytes} bytes running and one of {own_bytes} to add, "
                f"--max-bytes-per-client is {self._max_bytes}"
            )


class _Charged:
    """Requests as they come, each charged for and none held: gRPC's own iterator holds the last."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], charge: Charge) -> None:
        self._context = context
        self._charge = charge

    def __aiter__(self) -> _Charged:
        return self

    async def __anext__(self) -> bytes:
        data = await self._context.read()
        if data is grpc.aio.EOF:
            raise StopAsyncIteration
        self._charge(len(data))
        return bytes(data)


def client_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """By whom a request counts."""
    name = structlog.contextvars.get_contextvars().get("client")  # common.serving.authentication's
    if name is not None:
        return str(name)
    identities = context.peer_identities()
    if identities:
        return str(next(iter(identities)), "utf-8", "replace")
    peer = unquote(context.peer())  # ipv4:10.0.0.7:41234, ipv6:[::1]:41234 or unix:
    return peer if peer.startswith(("unix:", "unix-abstract:")) else peer.rpartition(":")[0]
