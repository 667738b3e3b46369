"""The services beside vLLM and transformers' `generate`: `python -m benchmarks.peers`."""
