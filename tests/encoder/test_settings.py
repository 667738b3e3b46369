"""The encoder's start: what it is told, and what keeps it from starting."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.contract.errors import StartupError
from services.encoder.settings import EncoderSettings


def test_flags_are_named_as_the_design_names_them() -> None:
    settings = EncoderSettings.load(
        ["--listen", "unix:/e", "--preprocessing", "unix:/p", "--output-buffer-bytes", "5", "--cache-bytes", "0"]
    )
    assert (settings.listen, settings.preprocessing) == ("unix:/e", "unix:/p")
    assert (settings.output_buffer_bytes, settings.cache_bytes, settings.dtype) == (5, 0, "auto")


def test_a_wrong_value_is_refused_by_its_flag() -> None:
    with pytest.raises(StartupError, match=r"--output-buffer-bytes.*got '0'"):
        EncoderSettings.load(["--output-buffer-bytes", "0"])


def test_a_device_that_is_not_there_is_named_and_the_exit_status_is_2(tiny_checkpoint: Path) -> None:
    command = [sys.executable, "-m", "services.encoder", "--model", str(tiny_checkpoint), "--device", "abacus"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert '"error": "--device abacus cannot be used' in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
