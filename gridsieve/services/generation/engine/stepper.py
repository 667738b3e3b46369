"""One step of the engine: schedule, launch, read, and send each request its events.

    without overlap   launch 1  sample 1  read 1  launch 2  sample 2  read 2
    with overlap      launch 1  sample 1  launch 2  read 1  sample 2  launch 3  read 2  sample 3
    device            [forward 1         ][sample 1][forward 2                ][sample 2][forward 3 …
    3 has drafts      launch 1  sample 1  launch 2  read 1  sample 2  read 2  draft 3  launch 3  sample 3  read 3

With overlap, a step is scheduled and its forward launched before the tokens of the one before it are known: the device
feeds them to it. The host reads them, and prepares what sampling depends on, grammars among it, while that forward is
computed. A request whose answer turns out to have ended is computed for one step too many, and not sampled.

A draft continues tokens that the host must know. So a step is read at once if the next step will have drafts, which is
foreseen from the tokens that are known by then (`Scheduler.foresees_drafts`): prompt lookup finds drafts after them, or
the head will draft. A step with drafts is also read at once, because the number of its tokens is known only then. A
head drafts before the launch. It reads the hidden states of a step once the tokens of the step are read.

It runs in the engine's thread and does not know the queue of commands: `engine` calls it, one step after another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic_ns
from typing import TypeVar

import structlog
import torch

from gridsieve.common.contract.errors import GridsieveError, Overloaded
from gridsieve.services.generation.engine.payoff import Payoff
from gridsieve.services.generation.engine.scheduler import Scheduler
from gridsieve.services.generation.engine.stats import Step
from gridsieve.services.generation.model.runner import OutOfStep, Runner, SampledStep
from gridsieve.services.generation.request.attending import Attending
from gridsieve.services.generation.request.batch import Chunk
from gridsieve.services.generation.request.request import Event, Failed, Finished, PrefillStarted, Request, Status
from gridsieve.services.generation.sampling.sampler import SampledToken

log = structlog.get_logger()

T = TypeVar("T")


class Stepper:
    """Computes the requests of a scheduler step by step, and ends them.

    lock: protects requests and scheduler. `step` takes it itself, and not while the model computes; callers of
        `fail` and `forget` hold it.
    cancel: called if a listener fails; must forget the request before the next step.
    on_step: called after each step.
    overlap: whether a forward may be launched before the step before it is read.
    payoff: is told what drafting costs and brings.
    given_up: whether `give_up` was called.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        cancel: Callable[[Request], None],
        on_step: Callable[[Step], None],
        overlap: bool,
        payoff: Payoff | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self.given_up = False
        self.began_ns: int | None = None  # of the step that runs now, on the monotonic clock; None between steps
        self._runner = runner
        self._scheduler = scheduler
        self._cancel = cancel
        self._on_step = on_step
        self._overlap = overlap
        self._payoff = payoff
        self._unread: SampledStep | None = None  # the last step, if its tokens have yet to be read
        self._read_ns = 0  # when a step was read last
        self._preemptions = 0  # until then

    def step(self) -> bool:
        """Launches a step and reads one. Returns False if there was nothing to do."""
        self.began_ns = monotonic_ns()
        chunks, unread = self._drafted(self._schedule()), self._unread
        self._unread = self._run_step(chunks)
        if not self._overlap or any(chunk.draft_tokens for chunk in chunks) or self._foresees_drafts():
            self._read()
        self.began_ns = None
        return bool(chunks or unread)

    def give_up(self, error: GridsieveError) -> None:
        """Fails all requests without waiting for the step, which may hang. They get no more events.

        Called without the lock. The scheduler is only read, because it may be what failed.
        """
        with self.lock:
            unfinished = [] if self.given_up else list(self._scheduler.requests())
            self.given_up = True
        for request in unfinished:
            self._call_listener(request, Failed(error))

    def fail(self, requests: Iterable[Request], error: Exception) -> None:
        """Fails requests and the siblings that have not started. Unexpected exceptions are not shown to callers."""
        for request in [each for one in requests for each in (*one.siblings, one)]:
            if request.status is not Status.DONE:
                self.forget(request)
                self._send(request, Failed(_as_failure(error)))

    def forget(self, request: Request) -> None:
        """Ends a request, what follows it, and the siblings that have not started, without an event. Its blocks are
        free."""
        if request.attending:
            self.forget(request.attending)
        if request.status is Status.DONE:
            return
        for sibling in request.siblings:
            self.forget(sibling)
        self._scheduler.remove(request)
        request.embeds = []

    def _foresees_drafts(self) -> bool:
        with self.lock:
            return self._scheduler.foresees_drafts()

    def _schedule(self) -> list[Chunk]:
        with self.lock:
            try:
                chunks = self._scheduler.schedule()
            except Exception as error:
                # Which request is at fault is unknown, and the scheduler is unusable: all requests fail.
                log.exception("scheduling failed")
                self.fail(self._scheduler.requests(), error)
                return []
            for request in (chunk.request for chunk in chunks):
                if not request.prefill_announced and request.prompt.complete:
                    request.prefill_announced = True
                    self._send(request, PrefillStarted())
        return chunks

    def _drafted(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """The chunks with the head's draft tokens; without any if drafting fails."""
        drafter = self._runner.drafter
        if drafter is None:
            return chunks
        drafted = self._attempt(chunks, lambda: drafter.draft(chunks))
        if isinstance(drafted, Exception):
            drafter.forget(chunks)
            drafted = drafter.draft(chunks)
        with self.lock:
            for before, chunk in zip(chunks, drafted, strict=True):
                if chunk.end < before.end:
                    self._scheduler.memory.shorten_step(chunk.request, chunk.end)
        return drafted

    def _extend(self, step: SampledStep, sampled: Mapping[Chunk, Sequence[SampledToken] | Exception]) -> None:
        """Lets the head read a step, before its requests give up blocks. If that fails, they are drafted for later."""
        drafter, hidden = self._runner.drafter, step.hidden
        if drafter is None or hidden is None:
            return
        tokens = {
            chunk: [each.token_id for each in found] for chunk, found in sampled.items() if isinstance(found, list)
        }
        if isinstance(self._attempt(step.chunks, lambda: drafter.extend(step.chunks, hidden, tokens)), Exception):
            drafter.forget(step.chunks)

    def _run_step(self, chunks: Sequence[Chunk]) -> SampledStep | None:
        """Launches the forward of a step, reads the step before it, and launches the sampling.

        If that fails, each chunk is computed by itself, and only requests that fail alone fail. A second try gives the
        same: keys and values are written again as they were, and the states of sampling change once all is sampled.
        """
        if not chunks:
            self._read()
            return None
        launched = self._attempt(chunks, lambda: self._runner.launch(chunks, self._unread))
        self._read()
        result = launched if isinstance(launched, Exception) else self._attempt(chunks, launched.sample)
        if not isinstance(result, Exception):
            self._mark_launched(chunks)
            return result
        del launched  # its logits take memory
        if len(chunks) == 1:
            with self.lock:
                self.fail([chunks[0].request], result)  # unless the step before has ended it
            return None
        for chunk in chunks:
            if chunk.request.status is not Status.DONE:  # the step before may have ended it
                self._unread = self._run_step([chunk])
                self._read()
        return None

    def _attempt(self, chunks: Sequence[Chunk], work: Callable[[], T]) -> T | Exception:
        """The result of work, or why it failed."""
        try:
            return work()
        except (torch.AcceleratorError, OutOfStep):  # the device or the other ranks are unusable: the thread must end
            raise
        except Exception as error:
            log.exception("step failed", request_ids=[chunk.request.id for chunk in chunks])
            return error.with_traceback(None)  # whose frames hold the step's memory

    def _mark_launched(self, chunks: Sequence[Chunk]) -> None:
        """The device computes later steps after this one, so they may use the keys and values that it will write."""
        with self.lock:
            for chunk in chunks:
                if chunk.request.status is Status.DONE:  # the step before has ended it
                    continue
                self._scheduler.mark_computed(chunk)
                if chunk.samples:
                    chunk.request.num_unread += 1
                    if chunk.request.siblings:
                        self._scheduler.start_siblings(chunk.request)

    def _read(self) -> None:
        """Reads the tokens of the unread step, if there is one."""
        step, self._unread = self._unread, None
        if step:
            sampled = step.read()
            self._extend(step, sampled)
            self._publish(step, self._postprocess(step.chunks, sampled))

    def _postprocess(self, chunks: Sequence[Chunk], sampled: Mapping[Chunk, Sequence[SampledToken] | Exception]) -> int:
        """Appends sampled tokens to their answers, ends answers and sends events. Returns the accepted draft tokens.

        sampled: for each chunk that samples, its accepted draft tokens and one more, or why its request must fail.
        """
        total_accepted = 0
        with self.lock:
            for chunk in chunks:
                request = chunk.request
                try:
                    total_accepted += self._append(chunk, sampled.get(chunk, ()))
                except Exception as error:
                    log.exception("request failed", request_id=request.id)
                    self.fail([request], error)
        return total_accepted

    def _append(self, chunk: Chunk, sampled: Sequence[SampledToken] | Exception) -> int:
        """Appends the tokens of one chunk. Returns its accepted draft tokens."""
        request = chunk.request
        if request.status is Status.DONE or not sampled:  # it ended or was cancelled meanwhile
            return 0
        if isinstance(sampled, Exception):
            raise sampled
        request.num_unread -= 1
        request.draft_tokens += chunk.num_draft_tokens
        if self._payoff and chunk.drafted:
            self._payoff.count_drafts(request, len(sampled) - 1)
        for accepted, token in enumerate(sampled):
            if accepted:  # the token before this one was a draft token
                self._scheduler.mark_computed(chunk, accepted)
                request.accepted_draft_tokens += 1
            delta, reason = request.append(token)
            self._send(request, delta)
            if reason and request.sampling.attention:
                attending = Attending(request, reason)
                self._scheduler.follow(attending, request)
                self.forget(request)
                request.attending = attending
                return accepted
            if reason:
                self.forget(request)
                counts = len(request.output_ids), request.draft_tokens, request.accepted_draft_tokens
                self._send(request, Finished(reason, *counts))
                return accepted
        if len(sampled) <= chunk.num_draft_tokens:
            self._scheduler.memory.drop_step(request)
        return len(sampled) - 1

    def _publish(self, sampled: SampledStep, accepted: int) -> None:
        before, self._preemptions = self._preemptions, self._scheduler.preemptions
        # Of this step it begins with drafting, before the launch; or it was launched in the step before this one.
        launched_ns = min(self.began_ns or sampled.began_ns, sampled.began_ns)
        began_ns, self._read_ns = max(launched_ns, self._read_ns), monotonic_ns()
        seconds = (self._read_ns - began_ns) * 1e-9
        step = Step.of(sampled.chunks, accepted, self._preemptions - before, seconds, sampled.replayed)
        if self._payoff and not step.prompt_tokens:
            self._payoff.count_step(step.sequences, any(chunk.drafted for chunk in sampled.chunks), seconds)
        self._on_step(step)

    def _send(self, request: Request, event: Event) -> None:
        if not self.given_up:
            self._call_listener(request, event)

    def _call_listener(self, request: Request, event: Event) -> None:
        """An exception of a listener is a bug: it costs its own request only."""
        try:
            request.on_event(event)
        except Exception:
            log.exception("listener failed", request_id=request.id)
            self._cancel(request)


def _as_failure(error: Exception) -> GridsieveError:
    """The error that the caller gets. Messages of unexpected exceptions are only logged."""
    if isinstance(error, torch.OutOfMemoryError):
        return Overloaded("the model's device had no memory left to compute this request")
    return error if isinstance(error, GridsieveError) else GridsieveError("the engine failed to compute this request")
