"""One language model on several devices: each rank holds a part of every layer, and all compute each step together.

    rank 0  the service: engine, scheduler, sampler      step ──socket──▶ other ranks      media rows ──broadcast──▶
    all     the same forward over the same packed rows, each with its own heads and its own part of the cache

Positions are packed rows' too, so each rank's rope is that of rank 0.
"""
