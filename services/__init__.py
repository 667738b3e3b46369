"""The three services. They import `common` and never each other."""

import os

# Before torch loads OpenMP. Its threads spin while they wait, and where another process holds their core that made a
# small forward take 310 ms instead of 4.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
