"""Sealed memory (memfd): passes bytes between the service and its worker processes without copying them.

It has a descriptor but no name, and its content cannot change once it is sealed. /dev/shm is not used: in a container
it is too small. Source: memfd_create(2), and fcntl(2) on sealing.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.contract.errors import PeerContract

UInt8Array: TypeAlias = NDArray[np.uint8]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SealedMemory:
    """Owns memory that is written in pieces and then sealed, until it is closed or garbage collected.

    Raises OSError without descriptors or memory.
    """

    descriptor = -1  # for `close`, if there is no descriptor left

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("framesieve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    def write(self, data: memoryview) -> None:
        rest = data.cast("B") if data.nbytes else memoryview(b"")
        while rest:
            rest = rest[os.write(self.descriptor, rest) :]

    def seal(self) -> None:
        """The content cannot change from now on."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)

    def release(self) -> int:
        """The descriptor, which the caller closes."""
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor

    def close(self) -> None:
        """May be called twice."""
        descriptor = self.release()
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = close


def sealed(data: memoryview) -> int:
    """A descriptor of sealed memory that holds the bytes. The caller closes it."""
    memory = SealedMemory()
    memory.write(data)
    memory.seal()
    return memory.release()


def mapped(descriptor: int, max_bytes: int) -> UInt8Array:
    """Maps sealed memory, uint8 [size], unmapped with the array. Closes the descriptor.

    Raises PeerContract if the memory is not sealed, is empty, or holds more than `max_bytes`. Without the seals a
    worker could shrink the memory while this process reads it, and the kernel would send SIGBUS.
    """
    try:
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0  # a file or a socket
        size_bytes = os.fstat(descriptor).st_size
        if seals & _SEALS != _SEALS or not 0 < size_bytes <= max_bytes:
            raise PeerContract(f"a worker's memory has {size_bytes} bytes of at most {max_bytes}, seals {seals:#x}")
        # Private: kernels before 6.7 refuse shared mappings of memory that is sealed against writing.
        memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_POPULATE, mmap.PROT_READ)
        return np.frombuffer(memory, np.uint8)
    finally:
        os.close(descriptor)
