"""Sealed memory (memfd): passes bytes from one process of this host to another without copying them.

It has a descriptor but no name, and its content cannot change once it is sealed. /dev/shm is not used: in a container
it is too small. Source: memfd_create(2), mmap(2), and fcntl(2) on sealing.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gridsieve.common.contract.errors import PeerContract

UInt8Array: TypeAlias = NDArray[np.uint8]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(3 * (ctypes.c_int,)), ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class SealedMemory:
    """Owns the descriptor of memory, until it is closed or garbage collected.

        made here     write, write, … ─▶ seal ─▶ sent
        received      checked ─▶ mapped

    Raises OSError without descriptors or memory.
    """

    descriptor = -1  # for `close`, if there is no descriptor left

    def __init__(self, received: int | None = None) -> None:
        """received: the descriptor of memory that another process made; by default, it is new and empty."""
        if received is None:
            received = os.memfd_create("gridsieve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.descriptor = received

    def write(self, data: memoryview) -> None:
        rest = data.cast("B") if data.nbytes else memoryview(b"")
        while rest:
            rest = rest[os.write(self.descriptor, rest) :]

    def seal(self) -> None:
        """The content cannot change from now on."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)

    def mapped(self, max_bytes: int, min_bytes: int = 1) -> UInt8Array:
        """The content, read only, uint8 [size]. It stays when the memory is closed, and is freed with the array.

        Writing to it ends the process. Raises PeerContract unless the memory is sealed and its size is within the
        bounds. Without the seals its maker could shrink it while this process reads it, and the kernel would send
        SIGBUS.
        """
        try:
            seals = fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0  # a file or a socket
        size_bytes = os.fstat(self.descriptor).st_size
        if seals & _SEALS != _SEALS or not min_bytes <= size_bytes <= max_bytes:
            raise PeerContract(
                f"shared memory has {size_bytes} bytes and the seals {seals:#x}, expected are {min_bytes} to "
                f"{max_bytes} bytes, sealed"
            )
        # Private: kernels before 6.7 refuse shared mappings of memory that is sealed against writing. Not by Python's
        # mmap, which keeps a descriptor of its own for each mapping.
        address = _LIBC.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_PRIVATE, self.descriptor, 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        content = (ctypes.c_uint8 * size_bytes).from_address(address)
        weakref.finalize(content, _LIBC.munmap, address, size_bytes).atexit = False
        return np.frombuffer(memoryview(content), np.uint8)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sealed(data: memoryview) -> int:
    """A descriptor of sealed memory that holds the bytes. The caller closes it."""
    memory = SealedMemory()
    memory.write(data)
    memory.seal()
    return memory.release()
