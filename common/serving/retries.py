"""Retries of upstream calls that are lost after their first response, within a budget.

Until a call's first response gRPC retries it by itself (`common/channels.py`), with the same
attempts, waits and budget.
"""

from __future__ import annotations

import asyncio
import random

from prometheus_client import Counter

from framesieve.common.channels import ATTEMPTS, BACKOFF_S
from framesieve.common.contract.errors import Unavailable

# The retry budget is counted in successes: a retry costs ten, and the budget holds at most 200 retries.
COST = 10
BURST = 200 * COST

RETRIES = Counter("framesieve_upstream_retries_total", "Calls that broke off and were retried", ["stage"])


class Retries:
    """The retry budget of all calls to one service: a burst, then one retry per ten successes. For one event loop."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._budget = BURST
        RETRIES.labels(stage)

    def succeeded(self) -> None:
        """Call it for each call that delivered everything."""
        self._budget = min(BURST, self._budget + 1)

    async def wait(self, attempt: int, lost: Unavailable) -> None:
        """Waits before attempt 2 or 3. Raises `lost` after the last attempt or where the budget is used up."""
        if attempt > ATTEMPTS or self._budget < COST:
            raise lost
        self._budget -= COST
        RETRIES.labels(self._stage).inc()
        await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 2) * random.uniform(0.8, 1.2))  # noqa: S311  (no secret)
