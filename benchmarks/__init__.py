"""Benchmarks: each measures a part of the system against another way to do the same."""

from gridsieve.services.compute.prepare import prepare

prepare()  # OpenMP's settings hold for the peer, too
