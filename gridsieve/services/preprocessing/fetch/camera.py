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
from functools import partial
from typing import TypeVar, cast

import structlog

from gridsieve.common.contract.errors import MediaRejected
from gridsieve.services.preprocessing.fetch.addresses import IPAddress
from gridsieve.services.preprocessing.fetch.urls import Url

_PIECE_BYTES = 2**16
# Decrypted at once: each byte may be in a record of its own.
_DECRYPTED_BYTES = 2**15
# After each piece, so that many small ones do not take the event loop.
_PAUSE_S = 0.005

log = structlog.get_logger()

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Camera:
    """connection: the worker's, see `relayed`. target: path and query. login: what goes before the host in its URL, or
    empty. silent_s: how long it may send no video.
    """

    connection: socket.socket
    target: str
    login: str = field(repr=False)
    silent_s: float


class Connection:
    """A connection to a camera, perhaps with TLS. asyncio's would decrypt 256 KiB at once, for tens of milliseconds."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tls: ssl.SSLContext | None, host: str
    ) -> None:
        self._reader, self._writer = reader, writer
        self._came, self._sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls.wrap_bio(self._came, self._sent, server_hostname=host) if tls else None

    async def shake_hands(self) -> None:
        """Raises OSError for a peer without a valid certificate."""
        if self._tls:
            await self._exchanged(self._tls.do_handshake)

    async def read(self) -> bytes:
        """Waits for the next bytes; empty at the end. Raises OSError where it breaks off."""
        if not self._tls:
            return await self._reader.read(_PIECE_BYTES)
        data = bytearray(await self._exchanged(partial(self._tls.read, _PIECE_BYTES)))
        with suppress(ssl.SSLWantReadError):
            while part := self._tls.read(_PIECE_BYTES):
                data += part
        return bytes(data)

    async def write(self, data: bytes) -> None:
        """Raises OSError where it breaks off."""
        if self._tls:
            self._tls.write(data)
            data = self._sent.read()
        self._writer.write(data)
        await self._writer.drain()

    async def rest(self) -> None:
        """Reads nothing for _PAUSE_S."""
        transport = cast(asyncio.Transport, self._writer.transport)
        reads = transport.is_reading()  # else the StreamReader has paused it, and will resume it
        transport.pause_reading()
        await asyncio.sleep(_PAUSE_S)
        if reads:
            transport.resume_reading()

    def end(self) -> None:
        """Nothing more will be written."""
        if self._tls:  # which has no end of one side
            self._writer.close()
        else:
            self._writer.write_eof()

    def abort(self) -> None:
        self._writer.transport.abort()

    async def _exchanged(self, work: Callable[[], T]) -> T:
        """What `work` with the TLS returns, once enough has come for it."""
        while True:
            with suppress(ssl.SSLWantReadError):
                done = work()
                self._writer.write(self._sent.read())
                return done
            self._writer.write(self._sent.read())
            data = await self._reader.read(_DECRYPTED_BYTES)
            self._came.write(data)
            if not data:
                self._came.write_eof()


async def connected(
    url: Url, addresses: Sequence[IPAddress], connect_s: float, tls: ssl.SSLContext | None
) -> Connection:
    """A connection to the first of the addresses that accepts one. The caller aborts it.

    connect_s: to connect to each of them, and again for its handshake. tls: None: without TLS.
    Raises MediaRejected if none does.
    """
    failed: Exception | None = None
    for address in addresses:
        try:
            async with asyncio.timeout(connect_s):
                streams = await asyncio.open_connection(str(address), url.port, limit=_PIECE_BYTES)
        except (OSError, TimeoutError) as error:
            failed = error
        else:
            connection = Connection(*streams, tls, url.host.name)
            try:
                async with asyncio.timeout(connect_s):
                    await connection.shake_hands()
                return connection
            except BaseException as error:
                connection.abort()
                if not isinstance(error, OSError | TimeoutError):
                    raise
                failed = error
        log.warning("address failed", host=url.host.name, address=str(address), error=repr(failed))
    raise MediaRejected(f"cannot be connected to{', or has no valid certificate' if tls else ''}") from failed


@asynccontextmanager
async def relayed(connection: Connection, fetched: Callable[[int], None]) -> AsyncIterator[socket.socket]:
    """A socket that speaks with the camera while the block runs; then the camera's connection is closed.

    Whoever passes the socket on closes it here, so that its end is seen. fetched: called with the bytes that came.
    """
    carrying: list[asyncio.Task[None]] = []
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            carrying.append(asyncio.create_task(_inward(connection, ours, fetched)))
            carrying.append(asyncio.create_task(_outward(ours, connection)))
            try:
                yield theirs
            finally:
                for task in carrying:
                    task.cancel()
                connection.abort()
                await asyncio.gather(*carrying, return_exceptions=True)
    finally:
        connection.abort()


async def _inward(connection: Connection, ours: socket.socket, fetched: Callable[[int], None]) -> None:
    """Until the camera's end, which the worker then sees."""
    with suppress(OSError):
        while data := await connection.read():
            fetched(len(data))
            await asyncio.get_running_loop().sock_sendall(ours, data)
            await connection.rest()
    with suppress(OSError):
        ours.shutdown(socket.SHUT_WR)


async def _outward(ours: socket.socket, connection: Connection) -> None:
    """Until the worker's end, which the camera then sees."""
    with suppress(OSError):
        while data := await asyncio.get_running_loop().sock_recv(ours, _PIECE_BYTES):
            await connection.write(data)
            await asyncio.sleep(_PAUSE_S)
        connection.end()
    with suppress(OSError):
        ours.shutdown(socket.SHUT_RD)
