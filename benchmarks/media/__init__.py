"""The media path, from a file to pruned embeddings: `python -m benchmarks.media`."""
