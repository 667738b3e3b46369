"""A camera (an RTSP server) that is connected to at an address that was checked. Its worker speaks with it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from framesieve.common.contract.errors import MediaRejected
from framesieve.services.preprocessing.fetch.addresses import IPAddress
from framesieve.services.preprocessing.fetch.urls import Url

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Camera:
    """connection: the caller closes it. target: path and query. login: what goes before the host in its URL, or empty.
    tls_host: the name that its certificate must hold; empty: without TLS. authorities: that it may be of, in DER.
    silent_s: how long it may send no video. fetched: called with the bytes that came.
    """

    connection: socket.socket
    target: str
    login: str = field(repr=False)
    tls_host: str
    authorities: bytes = field(repr=False)
    silent_s: float
    fetched: Callable[[int], None]


async def connected(url: Url, addresses: Sequence[IPAddress], connect_s: float) -> socket.socket:
    """A connection to the first of the addresses that accepts one. The caller closes it. connect_s: for each of them.

    Raises MediaRejected if none does.
    """
    failed: Exception | None = None
    for address in addresses:
        connection = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
        try:
            connection.setblocking(False)
            async with asyncio.timeout(connect_s):
                await asyncio.get_running_loop().sock_connect(connection, (str(address), url.port))
            return connection
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError | TimeoutError):
                raise
            log.warning("address failed", host=url.host.name, address=str(address), error=repr(error))
            failed = error
    raise MediaRejected("cannot be connected to") from failed
