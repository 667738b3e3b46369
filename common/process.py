"""What the C library does with memory that was freed. Source: mallopt(3), malloc_trim(3).

A service keeps it: tensors of megabytes come and go with every message and every layer, and each that is given back to
the kernel costs a page fault for every 4 KiB when it is wanted again. A process that waits for its next file gives it
back.
"""

from __future__ import annotations

import ctypes

# Of glibc's malloc.h. 32 MiB is the most that the first may be.
_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES = -3, 32 * 2**20
_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES = -1, 512 * 2**20
_M_TOP_PAD, _TOP_PAD_BYTES = -2, 64 * 2**20


_LIBC = ctypes.CDLL(None)


def keep_freed_memory() -> bool:
    """For the whole process, as far as half a GiB. False where the C library is not glibc, which changes nothing."""
    mallopt = getattr(_LIBC, "mallopt", None)
    if mallopt is None:
        return False
    return all(
        mallopt(option, size_bytes)
        for option, size_bytes in (
            (_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES),
            (_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES),
            (_M_TOP_PAD, _TOP_PAD_BYTES),
        )
    )


def give_back_freed_memory() -> None:
    """Once, whatever of it stands at whole pages; nothing where the C library is not glibc."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
