"""The machine, for the encoder and generation: devices, copies, graphs, ranks, and linear layers on a CPU.

It knows neither models nor requests.
"""
