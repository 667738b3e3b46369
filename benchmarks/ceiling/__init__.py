"""The path around a model that takes no time: `python -m benchmarks.ceiling`."""
