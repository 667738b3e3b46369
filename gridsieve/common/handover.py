"""Hands arrays to another process on this host in sealed memory, beside the gRPC stream that announces them.

    receiver   listens on a socket of its own and names it in its request ──────────────────▶ sender
    sender     connects; for each array: {secret, descriptor} ─▶ socket, then `shared` in a message ─▶ stream
    receiver   at that message takes the descriptor, which is already there, maps it, and says that it did

Both sides belong to one call. The socket has an abstract name, so that it exists in one network namespace and leaves
nothing behind. A sender that cannot reach it, or finds another user there, sends bytes in messages instead.
What arrives is trusted no more than those: it must come from a process of the same user that knows the request's
secret, be sealed, and have exactly the size that is expected. Nothing waits for a descriptor.

Source: unix(7) on abstract names, SO_PEERCRED and SCM_RIGHTS.
"""

from __future__ import annotations

import array
import asyncio
import hmac
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gridsieve.common.address import is_local
from gridsieve.common.contract.errors import InvalidRequest, Overloaded, PeerContract
from gridsieve.common.sealed_memory import SealedMemory, UInt8Array
from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.common.telemetry.metrics import MESSAGE_BYTES

# An address: what a socket's name ends with, then the secret.
_NAME_BYTES = 16
_ADDRESS_BYTES = 32
# A caller names a socket to which a service then connects: only ever one of these.
_PREFIX = b"\0gridsieve-"
# Connections that wait for `take`: the sender's, and those of strangers.
_BACKLOG = 8
# What is handed over and not yet taken, in one call: about as much as gRPC buffers. A single array may be larger.
_UNTAKEN_BYTES = 8 * 2**20
_PEER = struct.Struct("=iII")  # process, user and group
_TAKEN = b"\1"


class Receiver:
    """Takes what is handed over in one call. It must be closed.

    address: for the request; 32 bytes that only the service may see.
    """

    def __init__(self) -> None:
        """Raises OSError where the process has no descriptor left."""
        self.address = secrets.token_bytes(_ADDRESS_BYTES)
        self._sender: socket.socket | None = None
        self._listening = _socket()
        self._listening.bind(_name(self.address))
        self._listening.listen(_BACKLOG)

    def take(self, size_bytes: int) -> UInt8Array:
        """The array that a message announces, read only, uint8 [size_bytes]. It outlives the receiver.

        Raises PeerContract unless its descriptor was sent before the message, and is of sealed memory of this size;
        Overloaded where the process has no descriptor or memory left.
        """
        try:
            memory, sender = self._next()
            with memory:
                content = memory.mapped(size_bytes, min_bytes=size_bytes)
        except OSError as error:
            raise Overloaded(f"this process cannot take shared memory: {error.strerror}") from error
        try:
            sender.send(_TAKEN)
        except BlockingIOError:
            raise PeerContract("the sender of shared memory does not read acknowledgements") from None
        except OSError:  # the sender has ended, what it sent is here
            pass
        return content

    def close(self) -> None:
        """May be called twice."""
        self._listening.close()
        if self._sender is not None:
            self._sender.close()

    def _next(self) -> tuple[SealedMemory, socket.socket]:
        if self._sender is not None:
            return _received(self._sender, self.address), self._sender
        while True:
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                raise PeerContract("a message announces shared memory that was not sent") from None
            connection.setblocking(False)
            try:
                memory = _received(connection, self.address)
            except PeerContract:  # a stranger
                connection.close()
                continue
            except BaseException:
                connection.close()
                raise
            self._sender = connection
            return memory, connection


class Sender:
    """Hands over arrays in one call. It belongs to an event loop."""

    def __init__(self, connection: socket.socket, address: bytes, method: str) -> None:
        self._connection = connection
        self._method = method
        self._address = address
        self._untaken: deque[int] = deque()  # sizes in bytes
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._read)
        self._open = True

    async def send(self, memory: SealedMemory, size_bytes: int) -> bool:
        """Hands over sealed memory, which the caller may close. False: its bytes have to be sent in messages.

        Waits while the receiver has too much to take.
        """
        while self._untaken and sum(self._untaken) + size_bytes > _UNTAKEN_BYTES:
            await self._changed.wait()
        try:
            socket.send_fds(self._connection, [_secret(self._address)], [memory.descriptor])
        except OSError:  # no receiver, or too many descriptors in flight, which Linux counts per user
            return False
        self._untaken.append(size_bytes)
        MESSAGE_BYTES.labels(self._method, "sent").inc(size_bytes)
        add_request_stats(handed_over_bytes=size_bytes)
        return True

    async def wait_until_taken(self) -> None:
        """Returns once the receiver has taken everything, or is gone."""
        while self._untaken:
            await self._changed.wait()

    def close(self) -> None:
        """What was sent can still be taken. May be called twice."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._connection)
            self._connection.close()
            self._untaken.clear()

    def _read(self) -> None:
        try:
            said = self._connection.recv(len(_TAKEN))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said and self._untaken:
            self._untaken.popleft()
        else:
            self.close()
        self._changed.set()
        self._changed = asyncio.Event()


def receiver_of(target: str) -> Receiver | None:
    """A receiver for a call to this address; None if the service may be on another host, or no descriptor is left."""
    if not is_local(target):
        return None
    with suppress(OSError):
        return Receiver()
    return None


@contextmanager
def sender_to(address: bytes, method: str) -> Iterator[Sender | None]:
    """The sender to the receiver with this address, within; None if there is none that it can reach.

    method: of the call, for the metric of bytes sent.
    Raises InvalidRequest for an address of another length; an empty one has no receiver.
    """
    if len(address) not in (0, _ADDRESS_BYTES):
        raise InvalidRequest(f"must have {_ADDRESS_BYTES} bytes, got {len(address)}", field="handover")
    connection = _socket_to(address) if address else None
    if connection is None:
        yield None
        return
    sender = Sender(connection, address, method)
    try:
        yield sender
    finally:
        sender.close()


def _socket_to(address: bytes) -> socket.socket | None:
    """A connection to a process of the same user."""
    try:
        connection = _socket()
    except OSError:  # no descriptor is left
        return None
    with suppress(OSError):
        connection.connect(_name(address))
        if _user(connection) == os.geteuid():
            return connection
    connection.close()
    return None


def _received(connection: socket.socket, address: bytes) -> SealedMemory:
    """The memory of the next datagram. Raises PeerContract for none, or one of a stranger; Overloaded."""
    if _user(connection) != os.geteuid():
        raise PeerContract("shared memory was sent by another user")
    try:
        data, memory, complete = _datagram(connection)
    except ConnectionResetError:  # the sender has ended without reading what it was told; what it sent follows
        data, memory, complete = _datagram(connection)
    if not data:
        raise PeerContract("a message announces shared memory that was not sent")
    if not hmac.compare_digest(data, _secret(address)):
        raise PeerContract("shared memory was sent without the secret of its call")
    if not complete and not memory:
        raise Overloaded("this process has no descriptor left for shared memory")
    if len(memory) != 1:
        raise PeerContract(f"a message announces one array, {len(memory)} were sent")
    return memory[0]


def _datagram(connection: socket.socket) -> tuple[bytes, list[SealedMemory], bool]:
    """The next datagram: data, which is empty if there is none; memory; and whether the latter is complete."""
    descriptors = array.array("i")
    room = socket.CMSG_SPACE(descriptors.itemsize)
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        data, ancillary, received, _ = connection.recvmsg(_ADDRESS_BYTES, room, flags)
    except BlockingIOError:
        return b"", [], True
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, [SealedMemory(each) for each in descriptors], not received & socket.MSG_CTRUNC


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


def _name(address: bytes) -> bytes:
    return _PREFIX + address[:_NAME_BYTES].hex().encode()


def _secret(address: bytes) -> bytes:
    return address[_NAME_BYTES:]


def _user(connection: socket.socket) -> int:
    _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(user)
