"""The step loop: schedule, run, hand out tokens, in one thread.

It owns the requests between `submit` and their last event. Other threads reach it through commands, which it takes
between steps; it sleeps while there is nothing to run. It knows neither grpc, asyncio, settings nor metrics.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import structlog
from torch import Tensor

from common.errors import FramesieveError, Overloaded, PeerContract, PromptTooLong, Unavailable
from common.plan import Int32Array
from services.generation.blocks import BlockAllocator
from services.generation.request import Event, Failed, Finished, FinishReason, PrefillStarted, Request, Status, Tokens
from services.generation.runner import Runner
from services.generation.sampler import Chosen, SamplingState, sample
from services.generation.scheduler import Scheduler
from services.generation.windows import Window

log = structlog.get_logger()

STOP_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """As of the last step. `*_total` only grow."""

    running: int = 0
    waiting: int = 0
    awaiting_media: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    steps_total: int = 0
    tokens_computed_total: int = 0
    preemptions_total: int = 0


class Engine:
    """Answers requests with one model.

    chunk_tokens: at most this many tokens a step.
    max_running, max_waiting: requests that compute, and others that may queue behind them or await media.
    """

    def __init__(
        self,
        runner: Runner,
        allocator: BlockAllocator,
        chunk_tokens: int,
        max_running: int,
        max_waiting: int,
    ) -> None:
        self._runner = runner
        self._scheduler = Scheduler(allocator, chunk_tokens, max_running)
        self._capacity_tokens = allocator.total * allocator.block_tokens
        self._max_requests = max_running + max_waiting
        self._commands: SimpleQueue[tuple[Request | None, Callable[[], None]]] = SimpleQueue()
        self._lock = threading.Lock()  # guards the three below, which submit needs at once
        self._in_flight = 0
        self._arrivals = 0
        self._stopping = False
        self._stats = EngineStats(blocks_total=allocator.total)
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    # --- from any thread ---------------------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence, prompt and answer, that the cache holds."""
        return self._capacity_tokens

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that runs; requests that are left fail with Unavailable."""
        with self._lock:
            self._stopping = True
        self._commands.put((None, lambda: None))
        self._thread.join(STOP_WAIT_S)

    def submit(self, request: Request) -> None:
        """Takes a request over.

        Raises PromptTooLong if it can never fit, Overloaded if the queue is full, Unavailable once stopping.
        """
        if request.max_tokens > self._capacity_tokens:
            raise PromptTooLong(
                f"a prompt of {request.rope.tokens} tokens and max_new_tokens of {request.sampling.max_new_tokens} "
                f"need room for {request.max_tokens} tokens, the cache holds {self._capacity_tokens}"
            )
        with self._lock:
            if self._stopping:
                raise Unavailable("generation is draining", "generation")
            if self._in_flight >= self._max_requests:
                raise Overloaded(f"{self._in_flight} requests are running or waiting, which is the limit")
            self._in_flight += 1
            request.arrival = self._arrivals
            self._arrivals += 1
            self._commands.put((request, lambda: self._scheduler.add(request)))

    def deliver(self, request: Request, media_index: int, kept: Int32Array | None, embeds: Tensor) -> None:
        """Hands over one media item: kept int32 [K], None for all tokens; embeds [1 + levels, K, D].

        What does not fit the plan fails the request with PeerContract.
        """
        self._commands.put((request, lambda: self._deliver(request, media_index, kept, embeds)))

    def cancel(self, request: Request) -> None:
        """Frees what the request holds before the next step. It gets no further event once that is done."""
        self._commands.put((request, lambda: self._forget(request)))

    def stats(self) -> EngineStats:
        return self._stats

    # --- in the engine's thread --------------------------------------------------------------------------------

    def step(self) -> bool:
        """Takes commands, then schedules, runs and hands out tokens. False if there was nothing to run."""
        self._take_commands()
        windows: list[Window] = []
        try:
            windows = self._scheduler.schedule()
            if windows:
                self._run(windows)
        except Exception as error:
            log.exception("step failed", error=repr(error), windows=len(windows))
            # A schedule that failed says nothing about who is to blame, and leaves nothing to go on with.
            blamed = [window.request for window in windows] or list(self._scheduler.requests())
            self._fail(blamed, _as_failure(error))
        self._publish(windows)
        return bool(windows)

    def check_integrity(self) -> None:
        """Asserts that no block is lost or owned twice. Only where the engine's thread does not run."""
        self._scheduler.check_integrity()

    def _loop(self) -> None:
        try:
            while not self._stopping:
                if not self.step():
                    self._do(*self._commands.get())
            self._take_commands()
            self._fail(list(self._scheduler.requests()), Unavailable("generation was stopped", "generation"))
        except Exception as error:
            log.exception("the engine ended by a bug", error=repr(error))
            self._give_up()

    def _give_up(self) -> None:
        """Nobody may queue behind a thread that ends, nor wait for it. The scheduler itself may be what is broken."""
        with self._lock:
            self._stopping = True
        left = list(self._scheduler.requests())
        while not self._commands.empty():
            request, _ = self._commands.get()
            if request:
                left.append(request)
        for request in dict.fromkeys(left):
            if request.status is not Status.DONE:
                self._send(request, Failed(Unavailable("the engine of generation has failed", "generation")))

    def _take_commands(self) -> None:
        while True:
            try:
                request, act = self._commands.get_nowait()
            except Empty:
                return
            self._do(request, act)

    def _do(self, request: Request | None, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            log.exception("command failed", error=repr(error), request_id=request and request.id)
            if request:
                self._fail([request], _as_failure(error))

    def _deliver(self, request: Request, media_index: int, kept: Int32Array | None, embeds: Tensor) -> None:
        if request.status is not Status.AWAITING_MEDIA:  # finished, failed or cancelled meanwhile
            return
        request.rope.deliver(media_index, kept)
        expected = (1 + request.embed_levels, request.kept_counts[media_index], self._runner.model.hidden_size)
        if embeds.shape != expected:
            raise PeerContract(f"embeds of item {media_index} are {list(embeds.shape)}, not {list(expected)}")
        request.embeds[media_index] = embeds.to(self._runner.model.device)
        if request.rope.complete:
            self._scheduler.media_complete(request)

    def _run(self, windows: list[Window]) -> None:
        for window in windows:
            if window.request.rope.complete and not window.request.prefill_announced:
                window.request.prefill_announced = True
                self._send(window.request, PrefillStarted())
        sampled, logits = self._runner.run(windows)
        for window in windows:
            window.request.computed = window.end
        if not sampled:
            return
        states = [_sampling_state(window.request) for window in sampled]
        for window, chosen in zip(sampled, sample(logits, states), strict=True):
            self._append(window.request, chosen)

    def _append(self, request: Request, chosen: Chosen) -> None:
        """Adds a token to the answer, and ends it where an end token, a stop string or the limit says so."""
        token = chosen.token_id
        request.output_ids.append(token)
        ended = token in request.sampling.eos_ids
        full = len(request.output_ids) >= request.sampling.max_new_tokens
        text, stopped = ("", False) if ended else request.detokeniser.add(token)
        if (ended or full) and not stopped:
            text += request.detokeniser.flush()
        stopped = stopped or ended
        logprobs = () if chosen.logprob is None else (chosen.logprob,)
        self._send(request, Tokens(text, (token,), logprobs, (chosen.top,) if chosen.top else ()))
        if stopped or full:
            self._forget(request)
            reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            self._send(request, Finished(reason, len(request.output_ids)))

    def _send(self, request: Request, event: Event) -> None:
        """A listener that fails is a bug in the listener: its request is given up, the others go on."""
        try:
            request.on_event(event)
        except Exception as error:
            log.exception("listener failed", request_id=request.id, error=repr(error))
            self.cancel(request)

    def _fail(self, requests: Iterable[Request], error: FramesieveError) -> None:
        for request in requests:
            self._forget(request)
            self._send(request, Failed(error))

    def _forget(self, request: Request) -> None:
        if request.status is Status.DONE:
            return
        self._scheduler.remove(request)
        request.embeds = []
        with self._lock:
            self._in_flight -= 1

    def _publish(self, windows: list[Window]) -> None:
        scheduler, before = self._scheduler, self._stats
        self._stats = EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            awaiting_media=len(scheduler.awaiting_media),
            blocks_used=scheduler.allocator.used,
            blocks_total=scheduler.allocator.total,
            steps_total=before.steps_total + bool(windows),
            tokens_computed_total=before.tokens_computed_total + sum(window.tokens for window in windows),
            preemptions_total=scheduler.preemptions,
        )


def _as_failure(error: Exception) -> FramesieveError:
    """A bug's own words are for the log."""
    return error if isinstance(error, FramesieveError) else FramesieveError("the engine failed to compute this request")


def _sampling_state(request: Request) -> SamplingState:
    if request.sampling_state is None:
        request.sampling_state = SamplingState(request.sampling, request.rope.ids)
    return request.sampling_state
