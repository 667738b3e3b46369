"""Events to standard output, a line of JSON each."""

from __future__ import annotations

import typer

from framesieve.watch.events import Event


class StdoutSender:
    name = "stdout"

    async def deliver(self, event: Event, body: str) -> None:
        typer.echo(body)

    async def close(self) -> None:
        pass
