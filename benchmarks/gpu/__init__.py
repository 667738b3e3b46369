"""Measurements on a CUDA device, in calls that each end by themselves: `python -m benchmarks.gpu CALL`."""
