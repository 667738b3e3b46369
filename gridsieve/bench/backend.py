"""The server that a load is sent to: by gRPC, or by OpenAI's HTTP (`gridsieve.bench.http_backend`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from gridsieve.client.answer import Delta, Finished, Timings, Usage
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Message, Options, Part
from gridsieve.common.contract.errors import PeerContract


@dataclass(frozen=True, slots=True)
class Cost:
    """What the server reports after a completion. timings: None if it reports none."""

    usage: Usage
    timings: Timings | None


class Refused(Exception):
    """The server answered with an error of HTTP's."""

    def __init__(self, message: str, status: str, reason: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class Backend(Protocol):
    async def usual_method(self) -> str | None:
        """The method by which the server prunes where a request names a rate and no method; None of a server that does
        not tell. Raises as `answer`."""
        ...

    async def answer(self, parts: tuple[Part, ...], options: Options, arrived: Callable[[int], None]) -> Cost:
        """Sends a user's turn and reads its completion.

        arrived: called with the number of tokens of each message when it is received.
        Raises a subclass of GridsieveError, Refused, and OSError for a file that cannot be read.
        """
        ...


class GrpcBackend:
    def __init__(self, client: GridsieveClient) -> None:
        self._client = client

    async def usual_method(self) -> str | None:
        return (await self._client.models())[0].pruning_method

    async def answer(self, parts: tuple[Part, ...], options: Options, arrived: Callable[[int], None]) -> Cost:
        cost: Cost | None = None
        async with aclosing(self._client.events([Message("user", parts)], options)) as events:
            async for event in events:
                if isinstance(event, Delta) and event.token_ids:
                    arrived(len(event.token_ids))
                elif isinstance(event, Finished):
                    cost = Cost(event.usage, event.timings)
        if cost is None:
            raise PeerContract(f"the stream from {self._client.address} ended before the completion was finished")
        return cost
