"""The engine: one thread that computes steps until it is stopped, and the requests that other threads give it.

It owns requests from `submit` to their last event. `submit` takes effect at once, because the prefix cache decides
which media the caller must fetch; deliveries and cancellations are queued and run between steps. The thread sleeps
while nothing can run. `stepper` computes the steps.

It knows neither grpc, asyncio, settings nor metrics.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count, takewhile
from queue import SimpleQueue

import structlog
import torch

from gridsieve.common.contract.errors import (
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    Unavailable,
)
from gridsieve.services.generation.engine.payoff import Payoff
from gridsieve.services.generation.engine.scheduler import Scheduler
from gridsieve.services.generation.engine.speculation import Drafts, PromptLookup, Room
from gridsieve.services.generation.engine.stats import EngineStats, Step
from gridsieve.services.generation.engine.stepper import Stepper
from gridsieve.services.generation.memory.blocks import BlockAllocator
from gridsieve.services.generation.memory.lease import Lease
from gridsieve.services.generation.memory.memory import Memory
from gridsieve.services.generation.memory.state_slots import StateSlots
from gridsieve.services.generation.model.runner import OutOfStep, Runner
from gridsieve.services.generation.request.attending import check_size
from gridsieve.services.generation.request.encoded_media import MediaItem
from gridsieve.services.generation.request.encoded_media_cache import EncodedMediaCache
from gridsieve.services.generation.request.request import Request, Status

log = structlog.get_logger()

STOP_WAIT_S = 30.0
GIVEN_UP_WAIT_S = 1.0  # the thread may hang for good in a step that another rank has left


class Engine:
    """Answers requests with one model.

    max_num_batched_tokens: tokens of one step.
    max_num_seqs, max_waiting: requests that run, and other requests that wait for a place or for media.
    max_draft_tokens: draft tokens for each running request and step, of the model's head if it has one.
    overlap: whether a forward may be launched before the step before it is read; for devices that compute beside the
        host.
    states: slots of recurrent states, at least 2 · max_num_seqs; None for models without any.
    payoff: decides which steps have drafts, and of which requests; None: all that have any.
    live_blocks: the most that leases may have; other requests never count on them.
    max_yielding: beside how many requests, running and waiting, one that yields is accepted; None: as any other.
    on_step: called in the engine's thread after each step.
    on_end: called in the engine's thread if it ends without `stop`.
    """

    def __init__(
        self,
        runner: Runner,
        allocator: BlockAllocator,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_waiting: int,
        max_draft_tokens: int = 0,
        on_step: Callable[[Step], None] = lambda _: None,
        on_end: Callable[[], object] = lambda: None,
        overlap: bool = False,
        states: StateSlots | None = None,
        payoff: Payoff | None = None,
        live_blocks: int = 0,
        max_yielding: int | None = None,
    ) -> None:
        self._runner = runner
        drafts: Drafts = payoff or (Room() if runner.drafter else PromptLookup())
        self._memory = Memory(allocator, max_num_seqs, states, live_blocks)
        self._scheduler = Scheduler(self._memory, max_num_batched_tokens, max_num_seqs, max_draft_tokens, drafts)
        self._max_requests = max_num_seqs + max_waiting
        self._max_yielding = min(self._max_requests, max_yielding or self._max_requests)
        self._encoded_media = EncodedMediaCache(max_last_rows=allocator.block_tokens - 1)
        self._commands: SimpleQueue[tuple[Request | None, Callable[[], None]]] = SimpleQueue()
        self._promises: dict[Lease | Request, Future[None]] = {}  # of leases to open, and requests to interrupt
        self._arrivals = count()
        self._stopping = False
        self._on_end = on_end
        self._stepper = Stepper(runner, self._scheduler, self.cancel, on_step, overlap, payoff)
        self._lock = self._stepper.lock  # protects everything except the runner
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    # --- from any thread ---------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether requests are accepted: from `start` until the engine is stopped or fails."""
        return self._thread.is_alive() and not self._stopping

    @property
    def step_began_ns(self) -> int | None:
        """When the step that runs now began, on the monotonic clock; None between steps."""
        return self._stepper.began_ns

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the current step; unfinished requests fail with Unavailable."""
        with self._lock:
            self._stopping = True
        self._wake()
        self._thread.join(GIVEN_UP_WAIT_S if self._stepper.given_up else STOP_WAIT_S)

    def give_up(self) -> None:
        """Fails all requests with Unavailable, and does not wait for the thread, which may hang."""
        with self._lock:
            self._stopping = True
            self._break_promises()
        self._stepper.give_up(Unavailable("the engine of generation has failed", "generation"))

    def submit(self, request: Request) -> None:
        """Queues a request and its siblings. Afterwards `request.wanted_media` lists the items to deliver.

        Raises PromptTooLong if it can never fit, InvalidRequest if it has too many siblings to ever be accepted, or
        asks for attention that cannot be told, Overloaded if the queue is full, and Unavailable if the engine has
        ended. The queue has room for requests that borrow an open lease.
        """
        capacity = self._memory.capacity_tokens(request)
        if request.max_tokens > capacity:
            raise PromptTooLong(
                f"a prompt of {request.prompt.tokens} tokens and an answer of {request.sampling.max_new_tokens} need "
                f"room for {request.max_tokens} tokens, the cache holds {capacity}",
                value=request.max_tokens,
                limit=capacity,
            )
        if request.sampling.attention:
            if where := self._runner.unwatched:
                raise InvalidRequest(field="sampling.attention", limit=f"false {where}", value=True)
            check_size(request)
        with self._lock:
            if self._stopping:
                raise _ended()
            answers = (request, *request.siblings)
            if len(answers) > self._max_requests:
                which = "the number of answers that may run and wait (--max-num-seqs, --max-waiting-requests)"
                limit = f"at most {self._max_requests}, {which}"
                raise InvalidRequest(field="sampling.n", limit=limit, value=len(answers))
            # Those that yield take no place from the others.
            counted = (each for each in self._scheduler.requests() if request.yields or not each.yields)
            in_flight = sum(each.holding.grows for each in counted)
            added = sum(each.holding.grows for each in answers)
            most = max(added, self._max_yielding) if request.yields else self._max_requests
            if in_flight + added > most:
                which = " of requests that yield to others" if request.yields else ""
                raise Overloaded(
                    f"{in_flight} answers are running or waiting, {added} more would exceed the limit of {most}{which}"
                )
            for each in answers:
                each.arrival = (each.yields, next(self._arrivals))
            known = map(self._encoded_media.lookup, request.media_keys)
            self._scheduler.enqueue(request, [encoded for encoded in takewhile(bool, known) if encoded])
        self._wake()

    def deliver(self, request: Request, item: MediaItem) -> None:
        """Delivers a media item, or what has arrived of it so far, the parts delivered before included.

        item: one of `wanted_media`. If it keeps other tokens than the plan says, the request fails with PeerContract.
        """
        self._commands.put((request, lambda: self._deliver(request, item)))

    def cancel(self, request: Request) -> None:
        """Frees the request's blocks before the next step. It gets no events after that."""
        self._commands.put((request, lambda: self._stepper.forget(request)))

    def open(self, lease: Lease) -> Future[None]:
        """Gives a lease its blocks, once running requests leave enough. `close` ends waiting for them, too.

        Raises Unavailable; so does the result, and Overloaded if leases may not have so many more.
        """
        return self._promise(lease, lambda: self._scheduler.open(lease))

    def interrupt(self, request: Request) -> Future[None]:
        """Cancels a request, and tells when that is done. Raises Unavailable; so does the result."""
        return self._promise(request, lambda: self._interrupt(request))

    def close(self, lease: Lease) -> None:
        """Frees the blocks of a lease before the next step. Its request has ended or was cancelled."""
        self._commands.put((None, lambda: self._close(lease)))

    def stats(self) -> EngineStats:
        """The current state. May wait for scheduling, never for the model. Not for the engine's own thread."""
        with self._lock:
            return EngineStats.of(self._scheduler)

    # --- in the engine's thread --------------------------------------------------------------------------------

    def step(self) -> bool:
        """Runs queued commands, launches a step and reads one. Returns False if there was nothing to do."""
        self._run_commands()
        with self._lock:
            for lease in self._scheduler.opened():
                self._keep_promise(lease)
        return self._stepper.step()

    def check_integrity(self) -> None:
        """Asserts that no block is lost or owned twice. Only while the engine's thread does not run."""
        self._scheduler.check_integrity()

    def _loop(self) -> None:
        try:
            # Triton's kernels, among others, launch on torch's current device: it must be the model's.
            with torch.cuda.device_of(self._runner.model.embed_tokens.weight):
                while not self._stopping:
                    # `stop` may have come since the loop's condition, and `step` may have taken its wake-up.
                    if not self.step() and not self._stopping:
                        self._run_command(*self._commands.get())
            self._run_commands()
            with self._lock:
                self._break_promises()
                self._stepper.fail(self._scheduler.requests(), Unavailable("generation was stopped", "generation"))
        except OutOfStep as error:
            log.error("the engine ended: ranks are out of step", error=str(error))
            self._end()
        except Exception:
            log.exception("a bug ended the engine")
            self._end()

    def _end(self) -> None:
        self.give_up()
        self._on_end()

    def _wake(self) -> None:
        self._commands.put((None, lambda: None))

    def _run_commands(self) -> None:
        while not self._commands.empty():
            self._run_command(*self._commands.get())

    def _run_command(self, request: Request | None, command: Callable[[], None]) -> None:
        with self._lock:
            if self._stepper.given_up:  # all requests have their error, and the scheduler may be what failed
                return
            try:
                command()
            except Exception as error:
                log.exception("command failed", request_id=request and request.id)
                if request:
                    self._stepper.fail([request], error)

    def _promise(self, what: Lease | Request, command: Callable[[], None]) -> Future[None]:
        """Queues a command, of which an error breaks the promise. Raises Unavailable if the engine has ended."""
        promise: Future[None] = Future()
        promise.set_running_or_notify_cancel()

        def run() -> None:
            try:
                command()
            except Exception as error:
                if self._promises.pop(what, None):
                    promise.set_exception(error)

        with self._lock:
            if self._stopping:
                raise _ended()
            self._promises[what] = promise
            self._commands.put((None, run))
        return promise

    def _keep_promise(self, what: Lease | Request) -> None:
        if promise := self._promises.pop(what, None):
            promise.set_result(None)

    def _break_promises(self) -> None:
        while self._promises:
            self._promises.popitem()[1].set_exception(_ended())

    def _interrupt(self, request: Request) -> None:
        self._stepper.forget(request)
        self._keep_promise(request)

    def _close(self, lease: Lease) -> None:
        self._promises.pop(lease, None)
        self._scheduler.close(lease)

    def _deliver(self, request: Request, item: MediaItem) -> None:
        if request.status is Status.AWAITING_MEDIA:  # else it finished, failed or was cancelled meanwhile
            request.add_media(item, self._encoded_media.store(request.media_keys[item.media_index], item))
            self._scheduler.media_arrived(request)


def _ended() -> Unavailable:
    return Unavailable("the engine of generation has ended", "generation")
