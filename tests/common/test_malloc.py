"""Freed memory stays with the process, so that it is not faulted in again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from common.process import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
sizes = [8, 20, 31, 12]  # MiB
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def touch():
    for number in range(12):
        several = [np.ones(size << 20, np.uint8) for size in sizes]
touch()
before = faults()
touch()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_what_is_freed_is_not_faulted_in_again() -> None:
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "leave")
    )
    assert kept < given_back / 10
