"""Preprocessing's image holds neither torch nor transformers."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
for name in ("torch", "torchvision", "transformers"):
    sys.modules[name] = None
import services.preprocessing.__main__, services.preprocessing.workers.worker
"""


def test_it_starts_without_torch_and_transformers() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
