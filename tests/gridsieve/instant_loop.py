"""An event loop whose sleeps take no time, so that tests of timing are exact on any machine, however busy."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class InstantLoop(asyncio.SelectorEventLoop):
    """Its clock begins at `now` and jumps to the next timer once nothing else is left to run."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        loop: Any = self  # whose parts are asyncio's own
        if not loop._ready and loop._scheduled:
            self.now = max(self.now, loop._scheduled[0]._when)
        super()._run_once()  # type: ignore[misc]


def run(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        return runner.run(main)
