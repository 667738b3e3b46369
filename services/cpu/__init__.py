"""How the encoder and generation compute on a CPU."""
