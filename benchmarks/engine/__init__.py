"""The generation engine in this process: `python -m benchmarks.engine`."""
