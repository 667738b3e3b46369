"""How models of the encoder and generation compute linear layers, and what is compiled for the CPU."""
