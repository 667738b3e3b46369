"""An engine that the benchmark steps itself, and how long host and device take for its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

from benchmarks.gpu.device import Moment, wait
from benchmarks.prompts import submit
from gridsieve.common.contract.errors import GridsieveError
from gridsieve.common.contract.plan import PromptPlan
from gridsieve.services.generation.engine.engine import Engine
from gridsieve.services.generation.engine.stats import Step
from gridsieve.services.generation.memory.blocks import BlockAllocator
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.runner import LaunchedStep, Runner, SampledStep
from gridsieve.services.generation.request.batch import Chunk
from gridsieve.services.generation.request.request import Delta, Event, Failed, Finished, Request
from gridsieve.services.generation.sampling.sampler import SamplingParams

T = TypeVar("T")

BLOCK_TOKENS = 16
MOST_WAITING = 4096
SETTLING_STEPS = 3


@dataclass(frozen=True, slots=True)
class Launch:
    """What the device was given. host_s: until that was done. began, ended: on the device."""

    host_s: float
    began: Moment
    ended: Moment

    @property
    def device_s(self) -> float:
        return self.began.until(self.ended)


class TimedRunner(Runner):
    """Notes its launches, of forwards and of sampling."""

    def __init__(self, model: LanguageModel, blocks: int) -> None:
        super().__init__(model, blocks, BLOCK_TOKENS)
        self.blocks = blocks
        self.launches: list[Launch] = []

    def launch(self, chunks: Sequence[Chunk], before: SampledStep | None = None) -> LaunchedStep:
        launched = self.timed(lambda: super(TimedRunner, self).launch(chunks, before))
        return _TimedLaunched(
            launched.chunks, launched.logits, launched.began_ns, launched.replayed, launched.hidden, self
        )

    def timed(self, work: Callable[[], T]) -> T:
        began, start_s = Moment(self.model.device), time.perf_counter()
        done = work()
        self.launches.append(Launch(time.perf_counter() - start_s, began, Moment(self.model.device)))
        return done


@dataclass(frozen=True, slots=True)
class _TimedLaunched(LaunchedStep):
    """A launched step, whose sampling is timed, too."""

    runner: TimedRunner

    def sample(self) -> SampledStep:
        return self.runner.timed(lambda: LaunchedStep.sample(self))


@dataclass(eq=False, slots=True)
class Answer:
    """An answer so far. times_s: of its events with tokens, on the performance counter. error: why it failed."""

    request: Request | None = None
    asked_s: float = field(default_factory=time.perf_counter)
    times_s: list[float] = field(default_factory=list)
    events: list[Delta] = field(default_factory=list)
    finished: bool = False
    error: GridsieveError | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Failed):
            self.error = event.error
        if isinstance(event, Delta):
            self.times_s.append(time.perf_counter())
            self.events.append(event)
        self.finished |= isinstance(event, Finished)

    @property
    def token_ids(self) -> list[int]:
        return list(chain.from_iterable(each.token_ids for each in self.events))


@dataclass(frozen=True, slots=True)
class Steps:
    """Means of equal steps, in seconds.

    seconds: from one to the next. launch_s: of the host's launches. device_s: between the beginning and the end of what
    was launched, on the device. idle: the share of the time in which the device has nothing to do. replayed: the share
    of steps with graphs.
    """

    seconds: float
    launch_s: float
    device_s: float
    idle: float
    replayed: float


class SteppedEngine:
    """An engine over a runner, which may have had others; greedy unless asked otherwise, end tokens ignored."""

    def __init__(self, runner: TimedRunner, chunk_tokens: int, most_running: int, overlap: bool) -> None:
        self.runner, self.steps = runner, list[Step]()
        self._answers: list[Answer] = []
        self._engine = Engine(
            runner,
            BlockAllocator(runner.blocks, BLOCK_TOKENS),
            chunk_tokens,
            most_running,
            MOST_WAITING,
            on_step=self.steps.append,
            overlap=overlap,
        )

    def ask(self, plan: PromptPlan, params: SamplingParams) -> Answer:
        """Submits a question, with its media, if any, already encoded."""
        answer = Answer()
        self._answers.append(answer)
        answer.request = submit(self._engine, plan, params, answer)
        return answer

    def step(self) -> bool:
        """Whether there was anything to do. Raises the error of an answer that failed."""
        stepped = self._engine.step()
        for error in (each.error for each in self._answers):
            if error is not None:
                raise error
        self._answers = [each for each in self._answers if not each.finished]
        return stepped

    def drain(self) -> None:
        """Steps until all are answered."""
        while self.step():
            pass

    def cancel(self, answers: Sequence[Answer]) -> None:
        for each in answers:
            assert each.request is not None
            self._engine.cancel(each.request)
            self._answers.remove(each)
        self.drain()

    def measure(self, steps: int) -> Steps:
        """Of the next steps. All running answers must last longer."""
        for _ in range(SETTLING_STEPS):
            self.step()
        self.steps.clear()
        self.runner.launches.clear()
        start_s = time.perf_counter()
        for _ in range(steps):
            self.step()
        seconds = (time.perf_counter() - start_s) / steps
        wait(self.runner.model.device)
        device_s = sum(each.device_s for each in self.runner.launches) / steps
        return Steps(
            seconds=seconds,
            launch_s=sum(each.host_s for each in self.runner.launches) / steps,
            device_s=device_s,
            idle=max(0.0, 1 - device_s / seconds),
            replayed=sum(each.replayed for each in self.steps) / len(self.steps),
        )
