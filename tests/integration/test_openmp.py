"""The runtime that torch computes with in the services."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.fleet import Fleet, until


@pytest.mark.skipif(not Path(sys.prefix, "lib", "libiomp5.so").exists(), reason="Intel's OpenMP has no wheel here")
async def test_torch_in_a_service_computes_with_the_openmp_of_intel(fleet: Fleet) -> None:
    """The runtime prints its settings when it first runs a parallel region."""
    await until(lambda: all("KMP_BLOCKTIME=1" in each.log() for each in (fleet.encoder[0], fleet.generation)))
