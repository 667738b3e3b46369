"""Benchmarks: each measures a part of the system against another way to do the same."""

import framesieve.services  # noqa: F401  # its OpenMP setting holds for the peer too
