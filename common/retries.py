"""Calls that were lost after their first answer, begun anew: how often, how soon, and out of which budget.

Before the first answer gRPC does it itself (`common.channels`), in the same measure. It knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import random

from prometheus_client import Counter

from common.channels import ATTEMPTS, BACKOFF_S
from common.contract.errors import Unavailable

# In successes, of which one retry costs so many.
COST = 10
BURST = 200 * COST

RETRIES = Counter("framesieve_upstream_retries_total", "Calls that were lost halfway and tried again", ["stage"])


class Retries:
    """Of all calls to one service: a burst, then one in ten that succeed. It belongs to one event loop."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._budget = BURST
        RETRIES.labels(stage)

    def succeeded(self) -> None:
        """A call has brought all that was asked of it."""
        self._budget = min(BURST, self._budget + 1)

    async def wait(self, attempt: int, lost: Unavailable) -> None:
        """Waits before a call's attempt 2 or 3. Raises what it was lost by where there is none, or no budget left."""
        if attempt > ATTEMPTS or self._budget < COST:
            raise lost
        self._budget -= COST
        RETRIES.labels(self._stage).inc()
        await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 2) * random.uniform(0.8, 1.2))  # noqa: S311  (no secret)
