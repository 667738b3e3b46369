"""Settings of the libraries below torch, which read them once, when torch is imported.

Every process that computes calls `prepare` before its first import of torch, so this module does not import it.
Source: Intel's OpenMP runtime, KMP_BLOCKTIME; dlopen(3).
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path


def prepare() -> None:
    """Sets what the environment leaves unset, for this process and for those that it starts; does so once."""
    if "torch" in sys.modules:
        return
    # GNU's OpenMP threads spin for long while they wait. Where another process holds their core, a small forward took
    # 310 ms instead of 4.
    if not _use_intel_openmp():
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # How many sizes of products oneDNN keeps ready, in its own cache and in torch's. By default so many that a service
    # which sees prompts of every length grows by hundreds of MiB.
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "128")
    # Tensors of megabytes in huge pages, where the system gives them to those who ask: without, reading large weights
    # took a fifth longer.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Where compiled layers and kernels are kept. torch's own default is a folder in /tmp that another user may have
    # made, Triton's is in the user's home, which users of containers may lack.
    if caches := os.environ.get("XDG_CACHE_HOME") or (os.environ.get("HOME") and f"{os.environ['HOME']}/.cache"):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{caches}/gridsieve")
        os.environ.setdefault("TRITON_CACHE_DIR", f"{caches}/gridsieve/triton")


def _use_intel_openmp() -> bool:
    """Makes torch compute with Intel's OpenMP runtime instead of GNU's. Returns False where its wheel is not installed.

    Its threads spin for KMP_BLOCKTIME, a millisecond unless the environment says otherwise, before they sleep: long
    enough for the next operator of a small forward, too short to keep a core from another process. GNU's either sleep
    at once or spin for long. torch uses the runtime that was loaded first, so this has no effect once it is imported.
    """
    library = Path(sys.prefix, "lib", "libiomp5.so")
    if not library.exists():
        return False
    os.environ.setdefault("KMP_BLOCKTIME", "1")
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return True
