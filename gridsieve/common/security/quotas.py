"""Quotas: how many requests, and bytes of request messages, each client and all together may have running at a time.

A client is identified by the name of its token, else by its certificate, else by its address. All callers over a unix
socket are one client. Clients without running requests are not remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc
import structlog

from gridsieve.common.contract.errors import InvalidRequest, Overloaded

Charge: TypeAlias = Callable[[int], None]


@dataclass(slots=True)
class _Account:
    requests: int = 0
    size_bytes: int = 0


class ClientQuotas:
    """max_requests, max_bytes: limits for each client. max_total: requests of all together. None: no limit."""

    def __init__(
        self, max_requests: int | None = None, max_bytes: int | None = None, max_total: int | None = None
    ) -> None:
        self._max_total = max_total
        self._total = 0
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._accounts: dict[str, _Account] = {}

    @property
    def clients(self) -> int:
        """Number of clients with running requests."""
        return len(self._accounts)

    @contextmanager
    def request(self, client: str) -> Iterator[Charge]:
        """Counts one more request of a client inside. Yields a function that adds the size of a message.

        Raises Overloaded for too many requests. The yielded function raises Overloaded for too many bytes of all
        running requests, and InvalidRequest where one request alone exceeds the quota.
        """
        if self._max_total is not None and self._total >= self._max_total:
            raise Overloaded(f"{self._total} requests run or wait, --max-requests is {self._max_total}")
        account = self._accounts.get(client, _Account())
        if self._max_requests is not None and account.requests >= self._max_requests:
            raise Overloaded(
                f"{client} has {account.requests} requests running, --max-requests-per-client is {self._max_requests}"
            )
        self._accounts[client] = account
        account.requests += 1
        self._total += 1
        charged_bytes = 0

        def charge(size_bytes: int) -> None:
            nonlocal charged_bytes
            self._check(client, charged_bytes + size_bytes, account.size_bytes - charged_bytes)
            charged_bytes += size_bytes
            account.size_bytes += size_bytes

        _charge.set(charge)
        try:
            yield charge
        finally:
            account.requests -= 1
            self._total -= 1
            account.size_bytes -= charged_bytes
            if not account.requests:
                del self._accounts[client]

    def _check(self, client: str, own_bytes: int, others_bytes: int) -> None:
        """own_bytes: of this request; others_bytes: of the client's other requests."""
        if self._max_bytes is None:
            return
        if own_bytes > self._max_bytes:
            text = f"the request has {own_bytes} bytes, --max-bytes-per-client is {self._max_bytes}"
            raise InvalidRequest(text, value=own_bytes, limit=self._max_bytes)
        if own_bytes + others_bytes > self._max_bytes:
            raise Overloaded(
                f"{client} has {others_bytes} bytes in running requests, this request has {own_bytes} more, "
                f"--max-bytes-per-client is {self._max_bytes}"
            )


_charge: ContextVar[Charge] = ContextVar("charge", default=lambda _: None)


def charge_of_request() -> Charge:
    """The function that counts bytes which the running request keeps, as `ClientQuotas.request` yields it."""
    return _charge.get()


def client_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The client that a call is counted for."""
    name = structlog.contextvars.get_contextvars().get("client")  # bound where tokens are checked
    if name is not None:
        return str(name)
    identities = context.peer_identities()
    if identities:
        return str(next(iter(identities)), "utf-8", "replace")
    peer = unquote(context.peer())  # ipv4:10.0.0.7:41234, ipv6:[::1]:41234 or unix:
    return peer if peer.startswith(("unix:", "unix-abstract:")) else peer.rpartition(":")[0]
