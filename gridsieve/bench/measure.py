"""Sends one request of a load and records its latencies as the client sees them.

`gridsieve.bench.load` decides when requests are sent, `gridsieve.bench.report` aggregates the records.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing
from dataclasses import dataclass

from gridsieve.bench.workload import Workload
from gridsieve.client.answer import Delta, Finished, Timings, Usage
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Message, Options, Pruning
from gridsieve.common.contract.errors import GridsieveError, PeerContract


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed. status: the gRPC status, or CLIENT if it was never sent."""

    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Record:
    """The outcome of one request. Times are seconds, since the start of the load unless said otherwise.

    due_s, begun_s, done_s: when it was due, was sent, and was answered or failed.
    arrivals: (time, number of tokens) of each message with tokens.
    usage, timings: as reported by the server.
    A failed request has no arrivals, usage and timings.
    """

    number: int
    pruning: Pruning
    due_s: float
    begun_s: float
    done_s: float
    arrivals: tuple[tuple[float, int], ...] = ()
    usage: Usage | None = None
    timings: Timings | None = None
    failure: Failure | None = None

    @property
    def first_token_s(self) -> float | None:
        """From due_s to the first token; None without tokens."""
        return self.arrivals[0][0] - self.due_s if self.arrivals else None

    @property
    def token_gaps_s(self) -> tuple[float, ...]:
        """The time between consecutive tokens.

        The tokens of a message share the time since the previous message evenly; those of the first have no gaps.
        """
        gaps: list[float] = []
        for (before_s, _), (now_s, tokens) in itertools.pairwise(self.arrivals):
            gaps += [(now_s - before_s) / tokens] * tokens
        return tuple(gaps)

    @property
    def time_per_output_token_s(self) -> float | None:
        """From the first token to the end, for each further token; None for a completion of at most one token."""
        if self.usage is None or self.usage.completion_tokens < 2 or not self.arrivals:
            return None
        return (self.done_s - self.arrivals[0][0]) / (self.usage.completion_tokens - 1)

    @property
    def total_s(self) -> float:
        """From due_s to the end of the completion."""
        return self.done_s - self.due_s


async def timed(
    client: GridsieveClient,
    number: int,
    workload: Workload,
    pruning: Pruning,
    due_s: float,
    began_s: float,
    options: Options,
) -> Record:
    """Sends a request and reads its completion. Errors are recorded; only a cancellation is raised.

    due_s, began_s: when the request was due and when the load began, on the event loop's clock.
    options: of all requests, without the pruning.
    """
    clock = asyncio.get_running_loop().time
    begun_s = clock()
    arrivals: list[tuple[float, int]] = []
    finished: Finished | None = None
    failure: Failure | None = None
    asked: Options = {
        **options,
        "pruning_rate": pruning.rate,
        "pruning_method": pruning.method,
        "pruning_threshold": pruning.threshold,
    }
    try:
        parts = await asyncio.to_thread(workload.question, number)
        async with aclosing(client.events([Message("user", parts)], asked)) as events:
            async for event in events:
                if isinstance(event, Delta) and event.token_ids:
                    arrivals.append((clock() - began_s, len(event.token_ids)))
                elif isinstance(event, Finished):
                    finished = event
        if finished is None:
            raise PeerContract(f"the stream from {client.address} ended before the completion was finished")
    except GridsieveError as error:
        failure = Failure(error.status, error.reason, ": ".join([str(error), *getattr(error, "__notes__", ())]))
    except OSError as error:
        failure = Failure("CLIENT", "FILE", f"{error.filename}: {error.strerror}" if error.filename else str(error))
    record = (number, pruning, due_s - began_s, begun_s - began_s, clock() - began_s)
    if failure or finished is None:
        return Record(*record, failure=failure)
    return Record(*record, tuple(arrivals), finished.usage, finished.timings)
