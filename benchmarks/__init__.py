"""What is measured, and against what."""

import services  # noqa: F401  # its OpenMP setting holds for the peer too
