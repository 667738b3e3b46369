"""A camera (an RTSP server) that is connected to at an address that was checked. Its worker speaks with it.

    camera ─▶ the service's connection, perhaps with TLS ─▶ a pair of sockets ─▶ worker
           ◀─                                           ◀─                   ◀─

The worker gets an end of the pair, because whoever has a TCP socket can connect it anew, from the network in which it
was made. TLS is the service's, as for https.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import cast

import structlog

from framesieve.common.contract.errors import MediaRejected
from framesieve.services.preprocessing.fetch.addresses import IPAddress
from framesieve.services.preprocessing.fetch.urls import Url

_PIECE_BYTES = 2**16
# After each piece, so that many small ones do not take the event loop.
_PAUSE_S = 0.005

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Camera:
    """connection: the worker's, see `relayed`. target: path and query. login: what goes before the host in its URL, or
    empty. silent_s: how long it may send no video.
    """

    connection: socket.socket
    target: str
    login: str = field(repr=False)
    silent_s: float


async def connected(
    url: Url, addresses: Sequence[IPAddress], connect_s: float, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the first of the addresses that accepts one. The caller closes it.

    connect_s: to connect to each of them, and again for its handshake. tls: None: without TLS.
    Raises MediaRejected if none does.
    """
    failed: Exception | None = None
    for address in addresses:
        connection = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
        try:
            connection.setblocking(False)
            async with asyncio.timeout(connect_s):
                await asyncio.get_running_loop().sock_connect(connection, (str(address), url.port))
            return await asyncio.open_connection(
                sock=connection,
                limit=_PIECE_BYTES,
                ssl=tls,
                server_hostname=url.host.name if tls else None,
                ssl_handshake_timeout=connect_s if tls else None,
            )
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError | TimeoutError):
                raise
            log.warning("address failed", host=url.host.name, address=str(address), error=repr(error))
            failed = error
    raise MediaRejected(f"cannot be connected to{', or has no valid certificate' if tls else ''}") from failed


@asynccontextmanager
async def relayed(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fetched: Callable[[int], None]
) -> AsyncIterator[socket.socket]:
    """A socket that speaks with the camera while the block runs; then the camera's connection is closed.

    Whoever passes the socket on closes it here, so that its end is seen. fetched: called with the bytes that came.
    """
    carrying: list[asyncio.Task[None]] = []
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            carrying.append(asyncio.create_task(_inward(reader, writer, ours, fetched)))
            carrying.append(asyncio.create_task(_outward(ours, writer)))
            try:
                yield theirs
            finally:
                for task in carrying:
                    task.cancel()
                writer.transport.abort()
                await asyncio.gather(*carrying, return_exceptions=True)
    finally:
        writer.transport.abort()


async def _inward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ours: socket.socket, fetched: Callable[[int], None]
) -> None:
    """Until the camera's end, which the worker then sees."""
    transport = cast(asyncio.Transport, writer.transport)
    with suppress(OSError):
        while data := await reader.read(_PIECE_BYTES):
            transport.pause_reading()
            fetched(len(data))
            await asyncio.get_running_loop().sock_sendall(ours, data)
            await asyncio.sleep(_PAUSE_S)
            transport.resume_reading()
    with suppress(OSError):
        ours.shutdown(socket.SHUT_WR)


async def _outward(ours: socket.socket, writer: asyncio.StreamWriter) -> None:
    """Until the worker's end, which the camera then sees."""
    with suppress(OSError):
        while data := await asyncio.get_running_loop().sock_recv(ours, _PIECE_BYTES):
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(_PAUSE_S)
    if writer.can_write_eof():
        writer.write_eof()
    else:  # TLS has no end of one side
        writer.close()
    with suppress(OSError):
        ours.shutdown(socket.SHUT_RD)
