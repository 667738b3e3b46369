"""What the C library does with memory that was freed: it keeps it, where it would give every large piece back.

Prefill allocates and frees tens of MiB a layer. Given back to the kernel, they cost a page fault for every 4 KiB when
they are wanted again. Source: mallopt(3).
"""

from __future__ import annotations

import ctypes

# Of glibc's malloc.h. 32 MiB is the most that the first may be.
_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES = -3, 32 * 2**20
_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES = -1, 512 * 2**20
_M_TOP_PAD, _TOP_PAD_BYTES = -2, 64 * 2**20


def keep_freed_memory() -> bool:
    """For the whole process, as far as half a GiB. False where the C library is not glibc, which changes nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
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
