"""How long is waited before what failed is tried again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

_FIRST_S, _LONGEST_S = 1.0, 60.0


def growing_s() -> Iterator[float]:
    """1 s, 2 s, 4 s, … and then 60 s again and again, each by up to a fifth longer or shorter: what failed together is
    not tried again together."""
    for tried in count():
        yield min(_FIRST_S * 2**tried, _LONGEST_S) * random.uniform(0.8, 1.2)  # noqa: S311  (no secret)
