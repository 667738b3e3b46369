"""Concurrent clients of the soak, some of which disconnect early or set short deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from random import Random

from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Options
from gridsieve.common.contract.errors import Overloaded, Unavailable
from tests.soak.faults import Faults
from tests.soak.ledger import Ledger
from tests.soak.questions import Question, Questions

LIMIT_S = 60.0
BACK_OFF_S = 0.2
IMPATIENT_S = (0.05, 0.3, 1.0)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to one generation service. The ledger records how they end."""

    client: GridsieveClient
    questions: Questions
    ledger: Ledger
    faults: Faults
    random: Random

    async def during(self, work: Coroutine[None, None, None], clients: int) -> list[str]:
        """Asks until the work is done and all requests have ended; returns what went wrong."""
        enough = asyncio.Event()
        asking = [asyncio.create_task(self._keep_asking(enough)) for _ in range(clients)]
        await work
        enough.set()
        ended, stuck = await asyncio.wait(asking, timeout=2 * LIMIT_S)
        failures = [f"the load itself failed: {each.exception()!r}" for each in ended if each.exception()]
        return [*failures, *(["a request has no end"] * len(stuck))]

    async def ask(self, question: Question, limit_s: float = LIMIT_S) -> bool:
        """Asks, records the outcome and returns whether to back off. On CancelledError the caller records it."""
        start_s = time.monotonic()
        self.ledger.asked += 1
        try:
            options: Options = {**question.options, "timeout_s": limit_s}
            answer = await self.client.ask(question.media, question.text, **options)
        except Exception as error:
            gone = self.faults.gone_since(start_s)
            self.ledger.failed(question, error, gone=gone, impatient=limit_s < LIMIT_S)
            return isinstance(error, Overloaded | Unavailable)
        self.ledger.answered(question, answer.text)
        return False

    async def _keep_asking(self, enough: asyncio.Event) -> None:
        random = self.random
        while not enough.is_set():
            question = self.questions.draw()
            leaves_after_s = random.expovariate(2.0) if random.random() < 0.15 else None
            limit_s = random.choice(IMPATIENT_S) if random.random() < 0.05 else LIMIT_S
            try:
                async with asyncio.timeout(leaves_after_s):
                    turned_away = await self.ask(question, limit_s)
            except TimeoutError:
                self.ledger.left(question)
            else:
                await asyncio.sleep(BACK_OFF_S if turned_away else 0)
