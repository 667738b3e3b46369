"""Tensor parallelism: each rank is a process that holds a part of every layer; all ranks compute each step together.

    rank 0  the service: engine, scheduler, sampler      step ──socket──▶ workers      media rows ──broadcast──▶
    all     the same forward over the same packed rows, each with its own heads and its own part of the KV cache

The positions are part of the packed rows, so all ranks compute the same rotary embeddings.
"""
