"""Sends one request of a load and records its latencies as the client sees them.

`framesieve.bench.load` decides when requests are sent, `framesieve.bench.report` aggregates the records.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from common.contract.errors import FramesieveError, PeerContract
from common.contract.retention import Pruning
from framesieve.bench.workload import Question
from framesieve.client.answer import Delta, Finished, Timings, Usage
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Options


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed. status: the gRPC status, or CLIENT if the request was never sent."""

    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Record:
    """The outcome of one request. Times are seconds.

    due_s, begun_s, done_s: when it was due, was sent, and was answered or failed, since the start of the load.
    first_token_s: from due_s to the first token.
    token_gaps_s: one for each token after those of the first message, which mostly has one.
    usage, timings: as reported by the service. These and the token times are empty if the request failed.
    """

    number: int
    pruning: Pruning
    due_s: float
    begun_s: float
    done_s: float
    first_token_s: float | None = None
    token_gaps_s: tuple[float, ...] = ()
    usage: Usage | None = None
    timings: Timings | None = None
    failure: Failure | None = None

    @property
    def total_s(self) -> float:
        """From due_s to the end of the completion."""
        return self.done_s - self.due_s


async def timed(
    client: FramesieveClient, number: int, question: Question, due_s: float, began_s: float, options: Options
) -> Record:
    """Sends a request and reads its completion. Errors are recorded; only a cancellation is raised.

    due_s, began_s: when the request was due and when the load began, on the event loop's clock.
    options: of all requests; the question's pruning and max_new_tokens override them.
    """
    clock = asyncio.get_running_loop().time
    begun_s = clock()
    arrivals: list[tuple[float, int]] = []
    finished: Finished | None = None
    failure: Failure | None = None
    asked: Options = {**options, "pruning_rate": question.pruning.rate, "pruning_method": question.pruning.method}
    if question.max_new_tokens is not None:
        asked["max_new_tokens"] = question.max_new_tokens
    try:
        async for event in client.stream(question.media, question.text, **asked):
            if isinstance(event, Delta) and event.token_ids:
                arrivals.append((clock(), len(event.token_ids)))
            elif isinstance(event, Finished):
                finished = event
        if finished is None:
            raise PeerContract(f"the stream from {client.address} ended before all completions were finished")
    except FramesieveError as error:
        failure = Failure(error.status, error.reason, ": ".join([str(error), *getattr(error, "__notes__", ())]))
    except OSError as error:
        failure = Failure("CLIENT", "FILE", f"{error.filename}: {error.strerror}" if error.filename else str(error))
    done_s = clock()
    record = (number, question.pruning, due_s - began_s, begun_s - began_s, done_s - began_s)
    if failure is not None or finished is None:
        return Record(*record, failure=failure)
    first_s = arrivals[0][0] - due_s if arrivals else None
    return Record(*record, first_s, token_gaps(arrivals), finished.usage, finished.timings)


def token_gaps(arrivals: Sequence[tuple[float, int]]) -> tuple[float, ...]:
    """Seconds between consecutive tokens. arrivals: (time, number of tokens) of each message.

    The tokens of a message share the time since the previous message evenly; those of the first have no gaps.
    """
    gaps: list[float] = []
    for (before_s, _), (now_s, tokens) in itertools.pairwise(arrivals):
        gaps += [(now_s - before_s) / tokens] * tokens
    return tuple(gaps)
