"""Kills services of the soak, restarts them at the same addresses, and samples their memory."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from random import Random

from benchmarks.processes import resident_bytes
from tests.integration.fleet import Service

# For so long after generation is back, requests may still fail as unavailable: channels reconnect within a second.
AFTERMATH_S = 5.0
SAMPLE_S = 1.0


class Faults:
    """Faults of one fleet, in which only generation has no replica.

    killed: how often, by service; ended: descriptions of services that ended by themselves; memory_bytes: samples.
    """

    def __init__(self, services: Sequence[Service], random: Random) -> None:
        self._services = services
        self._random = random
        self._down: Service | None = None
        self._gone_s = -AFTERMATH_S
        self.killed: Counter[str] = Counter()
        self.ended: list[str] = []
        self.memory_bytes: list[list[int]] = [[] for _ in services]

    def gone_since(self, start_s: float) -> bool:
        """Whether generation was down since or just before `start_s` (monotonic clock)."""
        down = self._down is not None and self._down.name == "generation"
        return down or self._gone_s + AFTERMATH_S > start_s

    async def kill_for(self, seconds: float, every_s: float) -> None:
        """Kills the services in random order, each about `every_s` after the last one is back."""
        end = time.monotonic() + seconds
        while True:
            for service in self._random.sample(self._services, len(self._services)):
                await asyncio.sleep(every_s * self._random.uniform(0.5, 1.5))
                if time.monotonic() > end:
                    return
                await self._kill(service)

    async def sample(self) -> None:
        """Samples until cancelled. A service that ends by itself is recorded as a fault and restarted."""
        while True:
            for service, samples in zip(self._services, self.memory_bytes, strict=True):
                if service is self._down:
                    continue
                assert service.process is not None
                if service.process.poll() is not None:
                    self.ended.append(f"{service.name} ended by itself with {service.process.returncode}")
                    await asyncio.to_thread(_start, service)
                samples.append(resident_bytes(service.pid))
            await asyncio.sleep(SAMPLE_S)

    async def _kill(self, service: Service) -> None:
        self._down = service
        self.killed[service.name] += 1
        await asyncio.to_thread(service.kill)
        await asyncio.sleep(self._random.choice((0.0, 0.5, 3.0)))
        await asyncio.to_thread(_start, service)
        if service.name == "generation":
            self._gone_s = time.monotonic()
        self._down = None


def growth(samples: Sequence[int]) -> float:
    """The median of the last third over that of the middle third. During the first third caches fill."""
    third = len(samples) // 3
    middle, last = sorted(samples[third : 2 * third]), sorted(samples[2 * third :])
    return last[len(last) // 2] / middle[len(middle) // 2]


def _start(service: Service) -> None:
    service.start()
    service.ready()
