"""What the encoder and generation know of the machine: devices, copies, graphs, ranks, and linear layers on a CPU.

It knows neither models nor requests.
"""
