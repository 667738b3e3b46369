"""What tests ask an engine: a short text, and a video between two."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from tests.oracle import Item, Text

PROMPT = [Text((10, 11, 12, 13, 14))]
VIDEO = Item(2, 2, 2, Fraction(1), np.random.default_rng(1).normal(0, 0.3, (8, 64)).astype(np.float32), rate=0.25)
KEPT = [0, 1, 2, 3, 5, 7]
ABOUT_VIDEO = [Text((10, 11, 12)), VIDEO, Text((13, 14))]
