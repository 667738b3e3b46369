"""The three services. They import `common` and never each other."""

import os

# Before torch loads OpenMP. Its threads spin while they wait, and where another process holds their core that made a
# small forward take 310 ms instead of 4.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# How many sizes of products oneDNN keeps ready, in its own cache and in torch's. By default so many that a service
# which sees prompts of every length grows by hundreds of MiB.
for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(cache, "128")
