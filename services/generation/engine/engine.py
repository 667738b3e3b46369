"""The engine: one thread that schedules, runs and post-processes steps until it is stopped.

It owns requests from `submit` to their last event. `submit` takes effect at once, because the prefix cache decides
which media the caller must fetch; deliveries and cancellations are queued and run between steps. The lock protects
requests and scheduler and is not held while the model computes. The thread sleeps while nothing can run.

    without overlap   launch 1  sample 1  read 1  launch 2  sample 2  read 2
    with overlap      launch 1  sample 1  launch 2  read 1  sample 2  launch 3  read 2  sample 3
    device            [forward 1         ][sample 1][forward 2                ][sample 2][forward 3 …

With overlap, a step is scheduled and its forward launched before the tokens of the one before it are known: the device
feeds them to it. The host reads them, and prepares what sampling depends on, grammars among it, while that forward is
computed. A request whose answer turns out to have ended is computed for one step too many, and not sampled. Draft
tokens need the tokens: steps with them are read at once.

It knows neither grpc, asyncio, settings nor metrics.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from queue import Empty, SimpleQueue
from time import monotonic_ns
from typing import TypeVar

import structlog
import torch

from framesieve.common.contract.errors import (
    FramesieveError,
    InvalidRequest,
    Overloaded,
    PeerContract,
    PromptTooLong,
    Unavailable,
)
from framesieve.services.generation.engine.scheduler import Scheduler
from framesieve.services.generation.engine.stats import EngineStats, Step, Totals
from framesieve.services.generation.kv_cache.blocks import BlockAllocator
from framesieve.services.generation.kv_cache.encoded_media import EncodedMediaCache
from framesieve.services.generation.model.runner import OutOfStep, Runner, Sampled
from framesieve.services.generation.request.batch import Chunk
from framesieve.services.generation.request.encoded_media import MediaItem
from framesieve.services.generation.request.request import Event, Failed, Finished, PrefillStarted, Request, Status
from framesieve.services.generation.sampling.sampler import SampledToken

log = structlog.get_logger()

T = TypeVar("T")

STOP_WAIT_S = 30.0
GIVEN_UP_WAIT_S = 1.0  # the thread may hang for good in a step that another rank has left


class Engine:
    """Answers requests with one model.

    max_num_batched_tokens: tokens of one step.
    max_num_seqs, max_waiting: requests that run, and other requests that wait for a place or for media.
    max_draft_tokens: draft tokens for each running request and step.
    overlap: whether a forward is launched before the step before it is read; for devices that compute beside the host.
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
    ) -> None:
        self._runner = runner
        self._overlap = overlap and not max_draft_tokens
        self._unread: Sampled | None = None  # the last step, if its tokens have yet to be read
        self._read_ns = 0  # when a step was read last
        self._scheduler = Scheduler(allocator, max_num_batched_tokens, max_num_seqs, max_draft_tokens)
        self._capacity_tokens = allocator.total * allocator.block_tokens
        self._max_requests = max_num_seqs + max_waiting
        self._encoded_media = EncodedMediaCache(max_last_rows=allocator.block_tokens - 1)
        self._commands: SimpleQueue[tuple[Request | None, Callable[[], None]]] = SimpleQueue()
        self._lock = threading.Lock()  # protects everything except the runner
        self._step_began_ns: int | None = None  # None between steps
        self._in_flight = 0
        self._arrivals = 0
        self._stopping = False
        self._given_up = False
        self._totals = Totals()
        self._on_step = on_step
        self._on_end = on_end
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    # --- from any thread ---------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether requests are accepted: from `start` until the engine is stopped or fails."""
        return self._thread.is_alive() and not self._stopping

    @property
    def step_began_ns(self) -> int | None:
        """When the step that runs now began, on the monotonic clock; None between steps."""
        return self._step_began_ns

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the current step; unfinished requests fail with Unavailable."""
        with self._lock:
            self._stopping = True
        self._wake()
        self._thread.join(GIVEN_UP_WAIT_S if self._given_up else STOP_WAIT_S)

    def give_up(self) -> None:
        """Fails all requests with Unavailable without waiting for the thread, which may hang. They get no more events.

        The scheduler is only read, because it may be what failed.
        """
        with self._lock:
            if self._given_up:
                return
            self._stopping = self._given_up = True
            unfinished = list(self._scheduler.requests())
        for request in unfinished:
            self._call_listener(request, Failed(Unavailable("the engine of generation has failed", "generation")))

    def submit(self, request: Request) -> None:
        """Queues a request and its siblings. Afterwards `request.wanted_media` lists the items to deliver.

        Raises PromptTooLong if it can never fit, InvalidRequest if it has too many siblings to ever be accepted,
        Overloaded if the queue is full, and Unavailable if the engine has ended.
        """
        if request.max_tokens > self._capacity_tokens:
            raise PromptTooLong(
                f"a prompt of {request.prompt.tokens} tokens and sampling.max_new_tokens "
                f"{request.sampling.max_new_tokens} need room for {request.max_tokens} tokens, "
                f"the cache holds {self._capacity_tokens}"
            )
        with self._lock:
            if self._stopping:
                raise Unavailable("the engine of generation has ended", "generation")
            answers = (request, *request.siblings)
            if len(answers) > self._max_requests:
                raise InvalidRequest(
                    f"sampling.n must be at most {self._max_requests}, the number of answers that may run and wait "
                    f"(--max-num-seqs, --max-waiting-requests), got {len(answers)}"
                )
            if self._in_flight + len(answers) > self._max_requests:
                raise Overloaded(
                    f"{self._in_flight} answers are running or waiting, {len(answers)} more would exceed the limit of "
                    f"{self._max_requests}"
                )
            self._in_flight += len(answers)
            for each in answers:
                each.arrival = self._arrivals
                self._arrivals += 1
            known = map(self._encoded_media.lookup, request.media_keys)
            self._scheduler.add(request, [encoded for encoded in takewhile(bool, known) if encoded])
        self._wake()

    def deliver(self, request: Request, item: MediaItem) -> None:
        """Delivers a media item. An item that contradicts the plan fails the request with PeerContract."""
        self._commands.put((request, lambda: self._deliver(request, item)))

    def cancel(self, request: Request) -> None:
        """Frees the request's blocks before the next step. It gets no events after that."""
        self._commands.put((request, lambda: self._forget(request)))

    def stats(self) -> EngineStats:
        """The current state. May wait for scheduling, never for the model. Not for the engine's own thread."""
        with self._lock:
            return EngineStats.of(self._scheduler, self._totals)

    # --- in the engine's thread --------------------------------------------------------------------------------

    def step(self) -> bool:
        """Runs queued commands, launches a step and reads one. Returns False if there was nothing to do."""
        self._run_commands()
        self._step_began_ns = monotonic_ns()
        chunks, unread = self._schedule(), self._unread
        self._unread = self._launch(chunks)
        if not self._overlap:
            self._read()
        self._step_began_ns = None
        return bool(chunks or unread)

    def check_integrity(self) -> None:
        """Asserts that no block is lost or owned twice. Only while the engine's thread does not run."""
        self._scheduler.check_integrity()

    def _schedule(self) -> list[Chunk]:
        with self._lock:
            try:
                chunks = self._scheduler.schedule()
            except Exception as error:
                # The request at fault is unknown and the scheduler unusable: all of them fail.
                log.exception("scheduling failed")
                self._fail(self._scheduler.requests(), _as_failure(error))
                return []
            for request in (chunk.request for chunk in chunks):
                if not request.prefill_announced and request.prompt.complete:
                    request.prefill_announced = True
                    self._send(request, PrefillStarted())
        return chunks

    def _launch(self, chunks: Sequence[Chunk]) -> Sampled | None:
        """Launches the forward of a step, reads the step before it, and launches the sampling.

        If that fails, each chunk is computed by itself: only a request that fails alone fails. Computing keys and
        values twice writes the same, and nothing that needs much memory comes after a random number is drawn, but where
        draft tokens are verified one after the other.
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
            with self._lock:
                self._fail([chunks[0].request], _as_failure(result))  # unless the step before has ended it
            return None
        for chunk in chunks:
            if chunk.request.status is not Status.DONE:  # the step before may have ended it
                self._unread = self._launch([chunk])
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
        """Later steps are computed behind this one, so they may use the keys and values that it will write."""
        with self._lock:
            for chunk in chunks:
                if chunk.request.status is Status.DONE:  # the step before has ended it
                    continue
                self._scheduler.mark_computed(chunk.request, chunk.end - chunk.num_draft_tokens)
                if chunk.samples:
                    chunk.request.num_unread += 1
                    if chunk.request.siblings:
                        self._scheduler.start_siblings(chunk.request)

    def _read(self) -> None:
        """Reads the tokens of the unread step, if there is one."""
        step, self._unread = self._unread, None
        if step:
            self._publish(step, self._postprocess(step.chunks, step.read()))

    def _postprocess(self, chunks: Sequence[Chunk], sampled: Mapping[Chunk, Sequence[SampledToken] | Exception]) -> int:
        """Appends sampled tokens to their answers, ends answers and sends events. Returns the accepted draft tokens.

        sampled: for each chunk that samples, its accepted draft tokens and one more, or why its request must fail.
        """
        total_accepted = 0
        with self._lock:
            for chunk in chunks:
                request = chunk.request
                try:
                    total_accepted += self._append(chunk, sampled.get(chunk, ()))
                except Exception as error:
                    log.exception("request failed", request_id=request.id)
                    self._fail([request], _as_failure(error))
        return total_accepted

    def _append(self, chunk: Chunk, sampled: Sequence[SampledToken] | Exception) -> int:
        """Appends the tokens of one chunk. Returns its accepted draft tokens."""
        request = chunk.request
        if request.status is Status.DONE or not sampled:  # it ended or was cancelled meanwhile
            return 0
        if isinstance(sampled, Exception):
            raise sampled
        request.num_unread -= 1
        for accepted, token in enumerate(sampled):
            if accepted:  # the token before this one was a draft token: its keys and values are in the cache
                self._scheduler.mark_computed(request, chunk.end - chunk.num_draft_tokens + accepted)
            tokens, reason = request.append(token)
            self._send(request, tokens)
            if reason:
                self._forget(request)
                self._send(request, Finished(reason, len(request.output_ids)))
                return accepted
        return len(sampled) - 1

    def _publish(self, sampled: Sampled, accepted: int) -> None:
        preemptions = self._scheduler.preemptions - self._totals.preemptions
        began_ns, self._read_ns = max(sampled.began_ns, self._read_ns), monotonic_ns()
        seconds = (self._read_ns - began_ns) * 1e-9
        step = Step.of(sampled.chunks, accepted, preemptions, seconds, sampled.replayed)
        self._totals = self._totals.plus(step)
        self._on_step(step)

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
                self._fail(self._scheduler.requests(), Unavailable("generation was stopped", "generation"))
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
        while True:
            try:
                request, command = self._commands.get_nowait()
            except Empty:
                return
            self._run_command(request, command)

    def _run_command(self, request: Request | None, command: Callable[[], None]) -> None:
        with self._lock:
            try:
                command()
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
        expected = (
            1 + request.prompt.plan.embed_levels,
            request.prompt.kept_counts[index],
            self._runner.model.hidden_size,
        )
        if embeds.shape != expected:
            raise PeerContract(f"embeds of item {index} are {list(embeds.shape)}, not {list(expected)}")
        encoded = self._encoded_media.add(request.media_keys[index], item)
        request.add_media(index, encoded, embeds)
        if request.prompt.complete:
            self._scheduler.media_complete(request)

    def _send(self, request: Request, event: Event) -> None:
        if not self._given_up:
            self._call_listener(request, event)

    def _call_listener(self, request: Request, event: Event) -> None:
        """An exception of a listener is a bug: it costs its own request only."""
        try:
            request.on_event(event)
        except Exception:
            log.exception("listener failed", request_id=request.id)
            self.cancel(request)

    def _fail(self, requests: Iterable[Request], error: FramesieveError) -> None:
        """Fails requests and the siblings that have not started."""
        for request in [each for one in requests for each in (*one.siblings, one)]:
            if request.status is not Status.DONE:
                self._forget(request)
                self._send(request, Failed(error))

    def _forget(self, request: Request) -> None:
        if request.status is Status.DONE:
            return
        for sibling in request.siblings:
            self._forget(sibling)
        self._scheduler.remove(request)
        request.embeds = []
        self._in_flight -= 1


def _as_failure(error: Exception) -> FramesieveError:
    """The error that the caller gets. Messages of unexpected exceptions are only logged."""
    if isinstance(error, torch.OutOfMemoryError):
        return Overloaded("the model's device had no memory left to compute this request")
    return error if isinstance(error, FramesieveError) else FramesieveError("the engine failed to compute this request")
