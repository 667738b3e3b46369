"""Events to standard output, a line of JSON each."""

from __future__ import annotations

import typer

from framesieve.watch.outbox import Letter


class StdoutSender:
    name = "stdout"

    async def deliver(self, letter: Letter) -> None:
        typer.echo(letter.body)

    async def close(self) -> None:
        pass
