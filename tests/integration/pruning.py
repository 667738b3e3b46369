"""An encoder that waits before it prunes, which holds a request in a stage that takes only milliseconds."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gridsieve.client.client import GridsieveClient
from tests.integration.fleet import Fleet, Service, until
from tests.integration.load import Asked, endless, held_by, short_clip

_WAITS_BEFORE_PRUNING = """
import signal
from threading import Event
from gridsieve.common.serving.server import run
from gridsieve.services.encoder.items import item as items
from gridsieve.services.encoder.__main__ import main
keep_tokens, released = items.keep_tokens, Event()
def held(*args):
    print("waits before pruning", flush=True)
    released.wait()
    return keep_tokens(*args)
items.keep_tokens = held
signal.signal(signal.SIGUSR1, lambda *_: released.set())
run(main)
"""


@dataclass
class Pruning:
    """The encoder, the request that it holds until `release`, and one that is being answered meanwhile."""

    encoder: Service
    asked: Asked
    beside: Asked

    async def others_go_on(self) -> None:
        """Checks that the other request still gets tokens, and ends it."""
        tokens = self.beside.tokens
        await until(lambda: self.beside.tokens > tokens)
        assert self.beside.failed is None
        await self.beside.leave()

    def release(self) -> None:
        self.encoder.tell(signal.SIGUSR1)


@asynccontextmanager
async def held_in_pruning(fleet: Fleet, client: GridsieveClient, folder: Path, seed: int) -> AsyncIterator[Pruning]:
    """Starts that encoder at the address of the second one and holds the first request that reaches it."""
    first, second = fleet.encoder
    encoder = Service("encoder", first.model, folder, first.flags, second.address, program=_WAITS_BEFORE_PRUNING)
    encoder.start()
    try:
        await asyncio.to_thread(encoder.ready)
        asked = await held_by(lambda: "waits before pruning" in encoder.log(), client, 100 * seed + 1)
        beside = endless(client, short_clip(100 * seed))
        await until(lambda: beside.tokens)
        yield Pruning(encoder, asked, beside)
        await asked.leave()
        await beside.leave()
    finally:
        encoder.close()
