"""The step loop: schedule, run, hand out tokens, in one thread.

It owns the requests between `submit` and their last event. A request is added at once, under a lock that is free while
the model computes, for what the cache holds of it decides which media are fetched; other commands are taken between
steps. It sleeps while there is nothing to run. It knows neither grpc, asyncio, settings nor metrics.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from queue import Empty, SimpleQueue
from time import monotonic_ns

import structlog
import torch
from torch import Tensor

from common.contract.errors import FramesieveError, InvalidRequest, Overloaded, PeerContract, PromptTooLong, Unavailable
from services.generation.engine.outputs import Outputs, choose, first_rows
from services.generation.engine.scheduler import Scheduler
from services.generation.engine.stats import EngineStats, Step, Totals
from services.generation.kv_cache.blocks import BlockAllocator
from services.generation.kv_cache.encoded_media import Answers
from services.generation.model.runner import OutOfStep, Runner
from services.generation.request.batch import Window
from services.generation.request.encoded_media import MediaItem
from services.generation.request.request import Event, Failed, PrefillStarted, Request, Status
from services.generation.to_device import tensor_to_device

log = structlog.get_logger()

STOP_WAIT_S = 30.0
GIVEN_UP_WAIT_S = 1.0  # it may stand still for good, in a step that another rank has left


class Engine:
    """Answers requests with one model.

    chunk_tokens: at most this many tokens a step.
    max_running, max_waiting: requests that compute, and others that may queue behind them or await media.
    guess_tokens: at most this many tokens of each answer are guessed a step.
    on_step: told in the engine's thread what each step came to; on_end: told there if that ends unasked.
    """

    def __init__(
        self,
        runner: Runner,
        allocator: BlockAllocator,
        chunk_tokens: int,
        max_running: int,
        max_waiting: int,
        guess_tokens: int = 0,
        on_step: Callable[[Step], None] = lambda _: None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._runner = runner
        self._scheduler = Scheduler(allocator, chunk_tokens, max_running, guess_tokens)
        self._capacity_tokens = allocator.total * allocator.block_tokens
        self._max_requests = max_running + max_waiting
        self._outputs = Outputs(self._scheduler, self._send, self._forget)
        self._answers = Answers(allocator.block_tokens - 1)
        self._commands: SimpleQueue[tuple[Request | None, Callable[[], None]]] = SimpleQueue()
        self._lock = threading.Lock()  # guards everything but the runner, and is free while that computes
        self._in_flight = 0
        self._arrivals = 0
        self._guesses = 0
        self._right_guesses = 0
        self._stopping = False
        self._given_up = False
        self._totals = Totals()
        self._on_step = on_step
        self._on_end = on_end
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    # --- from any thread ---------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether requests are taken: from `start` until it is stopped, or ends by a bug."""
        return self._thread.is_alive() and not self._stopping

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that runs; requests that are left fail with Unavailable."""
        with self._lock:
            self._stopping = True
        self._commands.put((None, lambda: None))
        self._thread.join(GIVEN_UP_WAIT_S if self._given_up else STOP_WAIT_S)

    def give_up(self) -> None:
        """Nobody may queue behind a thread that ends or stands still, nor wait for it: requests fail with Unavailable.

        The scheduler itself may be what is broken. Nothing is told after that.
        """
        with self._lock:
            if self._given_up:
                return
            self._stopping = self._given_up = True
            left = list(self._scheduler.requests())
        for request in left:
            self._tell(request, Failed(Unavailable("the engine of generation has failed", "generation")))

    def submit(self, request: Request) -> None:
        """Takes a request over, and its followers. Its `wanted_media` then says which items are to be delivered.

        Raises PromptTooLong if it can never fit, Overloaded if the queue is full, Unavailable once it has ended.
        """
        if request.max_tokens > self._capacity_tokens:
            raise PromptTooLong(
                f"a prompt of {request.rope.tokens} tokens and max_new_tokens of {request.sampling.max_new_tokens} "
                f"need room for {request.max_tokens} tokens, the cache holds {self._capacity_tokens}"
            )
        with self._lock:
            if self._stopping:
                raise Unavailable("the engine of generation has ended", "generation")
            everyone = (request, *request.followers)
            if len(everyone) > self._max_requests:
                raise InvalidRequest(
                    f"sampling.n must be at most {self._max_requests} here, which is how many answers may run and wait "
                    f"(--max-num-seqs, --max-waiting-requests), got {len(everyone)}"
                )
            if self._in_flight + len(everyone) > self._max_requests:
                raise Overloaded(
                    f"{self._in_flight} answers are running or waiting, {len(everyone)} more are wanted, the limit is "
                    f"{self._max_requests}"
                )
            self._in_flight += len(everyone)
            for each in everyone:
                each.arrival = self._arrivals
                self._arrivals += 1
            known = map(self._answers.find, request.answer_keys)
            self._scheduler.add(request, [answer for answer in takewhile(bool, known) if answer])
        self._commands.put((None, lambda: None))

    def deliver(self, request: Request, item: MediaItem) -> None:
        """Hands over one media item. What does not fit the plan fails the request with PeerContract."""
        self._commands.put((request, lambda: self._deliver(request, item)))

    def cancel(self, request: Request) -> None:
        """Frees what the request holds before the next step. It gets no further event once that is done."""
        self._commands.put((request, lambda: self._forget(request)))

    def stats(self) -> EngineStats:
        """As of now. Waits while a step is scheduled, not while it is computed; never from the engine's own thread."""
        with self._lock:
            return EngineStats.of(self._scheduler, self._totals)

    # --- in the engine's thread --------------------------------------------------------------------------------

    def step(self) -> bool:
        """Takes commands, then schedules, runs and hands out tokens. False if there was nothing to run."""
        self._take_commands()
        windows: list[Window] = []
        began_ns = monotonic_ns()
        try:
            with self._lock:
                windows = self._scheduler.schedule()
                self._announce(windows)
            if windows:
                self._finish(windows, *self._runner.run(windows))
        except (torch.AcceleratorError, OutOfStep):  # the device, or another rank, is of no more use to this process
            raise
        except Exception as error:
            log.exception("step failed", request_ids=[window.request.id for window in windows])
            # A schedule that failed says nothing about who is to blame, and leaves nothing to go on with.
            with self._lock:
                self._fail([window.request for window in windows] or self._scheduler.requests(), _as_failure(error))
        self._publish(windows, began_ns)
        return bool(windows)

    def check_integrity(self) -> None:
        """Asserts that no block is lost or owned twice. Only where the engine's thread does not run."""
        self._scheduler.check_integrity()

    def _loop(self) -> None:
        try:
            # What asks torch which device is current, Triton's kernels among others, means the model's.
            with torch.cuda.device_of(self._runner.model.embed_tokens.weight):
                while not self._stopping:
                    if not self.step():
                        self._do(*self._commands.get())
            self._take_commands()
            with self._lock:
                self._fail(self._scheduler.requests(), Unavailable("generation was stopped", "generation"))
        except OutOfStep as error:
            log.error("the engine ended: ranks are out of step", error=str(error))
            self._give_out()
        except Exception:
            log.exception("the engine ended by a bug")
            self._give_out()

    def _give_out(self) -> None:
        self.give_up()
        self._on_end()

    def _take_commands(self) -> None:
        while True:
            try:
                request, act = self._commands.get_nowait()
            except Empty:
                return
            self._do(request, act)

    def _do(self, request: Request | None, act: Callable[[], None]) -> None:
        with self._lock:
            try:
                act()
            except Exception as error:
                log.exception("command failed", request_id=request and request.id)
                if request:
                    self._fail([request], _as_failure(error))

    def _deliver(self, request: Request, item: MediaItem) -> None:
        if request.status is not Status.AWAITING_MEDIA:  # finished, failed or cancelled meanwhile
            return
        index, embeds = item.media_index, item.embeds
        if index not in request.wanted_media:
            raise PeerContract(f"media item {index} does not exist or was delivered twice")
        expected = (1 + request.plan.embed_levels, request.kept_counts[index], self._runner.model.hidden_size)
        if embeds.shape != expected:
            raise PeerContract(f"embeds of item {index} are {list(embeds.shape)}, not {list(expected)}")
        answer = self._answers.note(request.answer_keys[index], item)
        # Nobody waits here for the device, which may never answer: `Arrival` has pinned them.
        request.take(index, answer, tensor_to_device(embeds, self._runner.model.device))
        if request.rope.complete:
            self._scheduler.media_complete(request)

    def _announce(self, windows: Sequence[Window]) -> None:
        for request in (window.request for window in windows):
            if request.rope.complete and not request.prefill_announced:
                request.prefill_announced = True
                self._send(request, PrefillStarted())

    def _finish(self, windows: Sequence[Window], sampled: Sequence[Window], logits: Tensor) -> None:
        with self._lock:
            for window in windows:
                self._scheduler.computed(window.request, window.end - window.guesses)
        self._guesses += sum(window.guesses for window in windows)
        rows, place = first_rows(sampled), 0
        while rows:
            chosen = choose(rows, logits)
            with self._lock:
                rows = self._outputs.accept(rows, chosen, place)
            self._right_guesses += len(rows)
            place += 1

    def _send(self, request: Request, event: Event) -> None:
        if not self._given_up:
            self._tell(request, event)

    def _tell(self, request: Request, event: Event) -> None:
        """A listener that fails is a bug in the listener: its request is given up, the others go on."""
        try:
            request.on_event(event)
        except Exception:
            log.exception("listener failed", request_id=request.id)
            self.cancel(request)

    def _fail(self, requests: Iterable[Request], error: FramesieveError) -> None:
        """And those that would have begun after them."""
        for request in [each for one in requests for each in (*one.followers, one)]:
            if request.status is not Status.DONE:
                self._forget(request)
                self._send(request, Failed(error))

    def _forget(self, request: Request) -> None:
        if request.status is Status.DONE:
            return
        for follower in request.followers:
            self._forget(follower)
        self._scheduler.remove(request)
        request.embeds = []
        self._in_flight -= 1

    def _publish(self, windows: list[Window], began_ns: int) -> None:
        """Adds a step up, and tells what it came to."""
        if not windows:
            return
        before, tokens = self._totals, sum(window.tokens for window in windows)
        self._totals = Totals(
            before.tokens + tokens,
            self._scheduler.preemptions,
            self._guesses,
            self._right_guesses,
        )
        self._on_step(Step.between(before, self._totals, windows, (monotonic_ns() - began_ns) * 1e-9))


def _as_failure(error: Exception) -> FramesieveError:
    """A bug's own words are for the log."""
    if isinstance(error, torch.OutOfMemoryError):
        return Overloaded("the model's device had no memory left to compute this request")
    return error if isinstance(error, FramesieveError) else FramesieveError("the engine failed to compute this request")
