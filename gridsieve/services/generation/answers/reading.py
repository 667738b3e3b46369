"""What was read of a prompt, from the events of its request."""

from __future__ import annotations

from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.services.generation.answers.events import Events
from gridsieve.services.generation.answers.metrics import count_first_token
from gridsieve.services.generation.request.reader import Reader
from gridsieve.services.generation.request.request import Failed, Finished, PrefillStarted, Read
from gridsieve.services.generation.sampling.rows import Float32Array
from gridsieve.services.generation.stage_clock import Stage, StageClock


async def row_of(reader: Reader, events: Events, clock: StageClock) -> Float32Array:
    """float32 [W]. It counts as a first token does. Raises the error of Failed, and exceptions."""
    row: Float32Array | None = None
    while True:
        for at_ns, _, event in await events.next():
            match event:
                case PrefillStarted():
                    clock.finish(Stage.WAIT_FOR_PREFILL, at_ns)
                case Read():
                    row = event.values
                    clock.token(at_ns)
                    count_first_token(clock, reader.cached_tokens)
                    add_request_stats(cached_prompt_tokens=reader.cached_tokens)
                case Finished() if row is not None:
                    return row
                case Failed():
                    raise event.error
                case Exception():
                    raise event
