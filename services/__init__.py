"""The three services. They import `common` and never each other."""

import os

from framesieve.common.process import use_intel_openmp

# Before torch loads OpenMP. GNU's threads spin for long while they wait, and where another process holds their core
# that made a small forward take 310 ms instead of 4.
if not use_intel_openmp():
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# How many sizes of products oneDNN keeps ready, in its own cache and in torch's. By default so many that a service
# which sees prompts of every length grows by hundreds of MiB.
for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(cache, "128")
# Tensors of megabytes in huge pages, where the system gives them to those who ask: reading large weights took a fifth
# longer without.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# Where compiled layers are kept. torch's own default is a folder in /tmp that another user may have made.
if caches := os.environ.get("XDG_CACHE_HOME") or (os.environ.get("HOME") and f"{os.environ['HOME']}/.cache"):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{caches}/framesieve")
