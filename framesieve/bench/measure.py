"""One question of a load, timed as its client sees it.

It owns what a record holds; when questions are asked is `framesieve.bench.load`'s, what is made of records
`framesieve.bench.report`'s.
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
from framesieve.client.wire import Options


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a question was not answered: gRPC's status (CLIENT: it never left this machine), the reason, the words."""

    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Record:
    """What became of one question. Times are seconds.

    due_s, begun_s, done_s: since the load began: when it should have been asked, was asked, was answered or failed.
    first_token_s: from due to the first token.
    token_gaps_s: between one token and the next, completion tokens − 1 of them.
    usage, timings: the service's own; None, and no times of tokens, where the question failed.
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
        """From due to the end of the answer."""
        return self.done_s - self.due_s


async def timed(
    client: FramesieveClient, number: int, question: Question, due_s: float, began_s: float, options: Options
) -> Record:
    """Asks, and reads the answer to its end. Only a cancellation is raised; what fails is in the record.

    due_s: on the event loop's clock. began_s: on the same, when the load began.
    options: the question's own pruning and max_new_tokens come over these.
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
            raise PeerContract(f"the stream from {client.address} ended before its answer did")
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
    """Seconds from each token to the next, of messages that arrived at a time with so many tokens.

    Tokens of one message share the time since the message before evenly; those of the first message have no gaps.
    """
    gaps: list[float] = []
    for (before_s, _), (now_s, tokens) in itertools.pairwise(arrivals):
        gaps += [(now_s - before_s) / tokens] * tokens
    return tuple(gaps)
