"""Arrays handed over in shared memory: what arrives, what is refused, and what a caller or a stranger cannot do."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from gridsieve.common import handover
from gridsieve.common.contract.errors import InvalidRequest, Overloaded, PeerContract
from gridsieve.common.handover import Receiver, Sender, receiver_of, sender_to
from gridsieve.common.sealed_memory import SealedMemory
from tests.sealed_memory import memory_of, unsealed

MIB = 2**20
BYTES = bytes(range(256)) * 16
ROOT = Path(__file__).parents[2]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture(autouse=True)
def no_descriptor_leaks() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() <= before


def descriptors() -> int:
    """Of sealed memory: others are opened and closed at any time by what earlier tests of this process have left."""
    links = (os.path.realpath(each) for each in Path("/proc/self/fd").iterdir())
    return sum(link.startswith("/memfd:") for link in links)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
async def sender(receiver: Receiver) -> AsyncIterator[Sender]:
    with sender_to(receiver.address, "Encode") as made:
        assert made is not None
        yield made


async def hand_over(sender: Sender, content: bytes) -> None:
    with memory_of(content) as memory:
        assert await sender.send(memory, len(content))


def connected(address: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(b"\0gridsieve-" + address[:16].hex().encode())
    return connection


async def test_arrays_arrive_in_order_and_outlive_both_sides() -> None:
    receiver = Receiver()
    with sender_to(receiver.address, "Encode") as sender:
        assert sender is not None
        for content in (BYTES, b"1"):
            await hand_over(sender, content)
        first = receiver.take(len(BYTES))
    second = receiver.take(1)
    receiver.close()
    assert (first.tobytes(), second.tobytes()) == (BYTES, b"1")


async def test_only_little_is_sent_before_it_is_taken(receiver: Receiver, sender: Sender) -> None:
    size_bytes = handover._UNTAKEN_BYTES // 2
    for _ in range(2):
        await hand_over(sender, bytes(size_bytes))
    third = asyncio.create_task(hand_over(sender, b"third"))
    everything = asyncio.create_task(sender.wait_until_taken())
    await asyncio.sleep(0.1)
    assert not third.done()
    receiver.take(size_bytes)
    await third
    receiver.take(size_bytes)
    await asyncio.sleep(0.1)
    assert not everything.done()
    assert receiver.take(5).tobytes() == b"third"
    await everything
    await hand_over(sender, bytes(3 * size_bytes))  # a single array may be larger
    receiver.take(3 * size_bytes)


@pytest.mark.parametrize("waits", ["for room", "until everything is taken"])
async def test_a_receiver_that_ends_keeps_no_sender_waiting(waits: str) -> None:
    receiver = Receiver()
    with sender_to(receiver.address, "Encode") as sender, memory_of(BYTES) as memory:
        assert sender is not None
        assert await sender.send(memory, handover._UNTAKEN_BYTES)
        waiting = asyncio.create_task(sender.send(memory, 1) if waits == "for room" else sender.wait_until_taken())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        receiver.close()
        assert await asyncio.wait_for(waiting, 10) in (False, None)
        assert not await sender.send(memory, 1)


async def test_nobody_is_reached_at_an_unknown_name_or_at_a_full_socket(receiver: Receiver) -> None:
    with sender_to(secrets.token_bytes(32), "Encode") as unknown, sender_to(b"", "Encode") as none:
        assert unknown is none is None
    crowd = [connected(receiver.address) for _ in range(handover._BACKLOG + 1)]
    with sender_to(receiver.address, "Encode") as late:
        assert late is None
    for each in crowd:
        each.close()
    with pytest.raises(InvalidRequest, match="handover must have 32 bytes, got 31"), sender_to(bytes(31), "Encode"):
        pass
    assert receiver_of("127.0.0.1:1,10.0.0.1:1") is None


@contextmanager
def another_user() -> Iterator[None]:
    """Sockets that connect or listen inside are another user's."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@as_root
async def test_nothing_is_taken_from_another_user_nor_sent_to_one(receiver: Receiver) -> None:
    with another_user(), sender_to(receiver.address, "Encode") as none:
        assert none is None
    with another_user():
        stranger = connected(receiver.address)
    with stranger, memory_of(BYTES) as theirs:
        socket.send_fds(stranger, [receiver.address[16:]], [theirs.descriptor])
        with pytest.raises(PeerContract, match="not sent"):
            receiver.take(len(BYTES))
    with sender_to(receiver.address, "Encode") as sender:
        assert sender is not None
        await hand_over(sender, BYTES)
        assert receiver.take(len(BYTES)).tobytes() == BYTES


async def test_strangers_of_the_same_user_are_passed_over(receiver: Receiver) -> None:
    with memory_of(b"theirs") as theirs:
        silent, gone, forging = (connected(receiver.address) for _ in range(3))
        gone.close()
        socket.send_fds(forging, [bytes(16)], [theirs.descriptor])
        with sender_to(receiver.address, "Encode") as sender:
            assert sender is not None
            await hand_over(sender, BYTES)
            assert receiver.take(len(BYTES)).tobytes() == BYTES
            for closed in (silent, forging):
                with suppress(ConnectionResetError):  # closed with unread data
                    assert closed.recv(1) == b""
                closed.close()


def file(content: bytes) -> SealedMemory:
    return SealedMemory(os.open(__file__, os.O_RDONLY))


@pytest.mark.parametrize("announced", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(
    "memories",
    [
        [unsealed],
        [file],
        [lambda content: memory_of(content[1:])],
        [lambda content: memory_of(content + b"!")],
        [],
        [memory_of, memory_of],
    ],
    ids=["unsealed", "a file", "too small", "too large", "none", "two"],
)
async def test_memory_of_another_kind_or_size_is_refused(
    receiver: Receiver, memories: list[Callable[[bytes], SealedMemory]], announced: bool
) -> None:
    with connected(receiver.address) as connection:
        if announced:
            with memory_of(b"0") as before:
                socket.send_fds(connection, [receiver.address[16:]], [before.descriptor])
            assert receiver.take(1).tobytes() == b"0"
        made = [make(BYTES) for make in memories]
        socket.send_fds(connection, [receiver.address[16:]], [each.descriptor for each in made])
        with pytest.raises(PeerContract):
            receiver.take(len(BYTES))


async def test_what_was_not_sent_is_refused_at_once(receiver: Receiver, sender: Sender) -> None:
    await hand_over(sender, b"1")
    receiver.take(1)
    for gone in (False, True):
        if gone:
            sender.close()
        with pytest.raises(PeerContract, match="not sent"):
            receiver.take(1)


async def test_a_sender_that_reads_nothing_is_refused_before_its_receiver_would_wait(receiver: Receiver) -> None:
    def take_many() -> None:
        for _ in range(1000):
            socket.send_fds(connection, [receiver.address[16:]], [memory.descriptor])
            receiver.take(1)

    with connected(receiver.address) as connection, memory_of(b"1") as memory, pytest.raises(PeerContract):
        take_many()


async def test_without_a_descriptor_left_calls_go_on_without_shared_memory_or_are_refused(receiver: Receiver) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    late = Receiver()
    with sender_to(receiver.address, "Encode") as sender, sender_to(late.address, "Encode") as other:
        assert sender is not None
        assert other is not None
        for _ in range(2):
            await hand_over(sender, b"1")
        await hand_over(other, b"1")
        receiver.take(1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            assert receiver_of("127.0.0.1:1") is None
            with sender_to(receiver.address, "Encode") as none:
                assert none is None
            for each in (receiver, late):  # connected, and not yet
                with pytest.raises(Overloaded):
                    each.take(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            late.close()


async def test_content_is_read_only_and_starts_where_the_memory_does(receiver: Receiver, sender: Sender) -> None:
    content = np.arange(3 * 4096, dtype=np.uint8)
    await hand_over(sender, content.tobytes())
    taken = receiver.take(content.nbytes)
    assert np.array_equal(taken, content)
    writing = "import sys; from gridsieve.common.sealed_memory import SealedMemory, sealed as s\n"
    writing += "a = SealedMemory(s(memoryview(b'12'))).mapped(2); a[0] = 1"
    assert subprocess.run([sys.executable, "-c", writing], cwd=ROOT, check=False).returncode == -11
