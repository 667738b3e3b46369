"""What the engine says of itself: how long requests have been what they are, and what each step came to."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns

from services.generation.engine.stats import Step
from services.generation.sampling.sampler import SamplingParams
from tests.generation.engine_questions import ABOUT_VIDEO, KEPT, PROMPT, VIDEO
from tests.oracle import Text
from tests.tiny import Models, TinyEngine

pytest_plugins = ["tests.generation.engine_fixtures"]


def timed(act: Callable[[], object]) -> tuple[int, int]:
    """When it began and ended."""
    before_ns = monotonic_ns()
    act()
    return before_ns, monotonic_ns()


def test_the_oldest_of_each_state_says_since_when_it_is_so(models: Models) -> None:
    tiny = TinyEngine(models.engine, max_num_seqs=1)
    stats = tiny.engine.stats()
    assert (stats.running_since_ns, stats.waiting_since_ns, stats.awaiting_media_since_ns) == (None, None, None)
    about = tiny.ask("about a video", ABOUT_VIDEO, SamplingParams(1))
    first, _ = (
        timed(lambda name=name: tiny.ask(name, PROMPT, SamplingParams(4), [SamplingParams(4)]))  # type: ignore[misc]
        for name in ("first", "second")
    )
    stats = tiny.engine.stats()  # as of now, before any step
    assert (stats.running, stats.waiting, stats.awaiting_media, stats.awaiting_sibling) == (0, 2, 1, 2)
    assert stats.awaiting_media_since_ns is not None
    assert stats.awaiting_media_since_ns < first[0]
    assert stats.waiting_since_ns is not None
    assert first[0] < stats.waiting_since_ns < first[1]
    stepped = timed(tiny.engine.step)
    stats = tiny.engine.stats()
    assert stats.running == 1
    assert stats.running_since_ns is not None
    assert stepped[0] < stats.running_since_ns < stepped[1]
    tiny.deliver(about, 0, VIDEO, KEPT)
    tiny.drain()
    stats = tiny.engine.stats()
    assert (stats.running_since_ns, stats.waiting_since_ns, stats.awaiting_media_since_ns) == (None, None, None)


def test_steps_tell_what_they_computed_of_prompts_and_of_answers(models: Models) -> None:
    steps: list[Step] = []
    tiny = TinyEngine(models.engine, max_num_batched_tokens=4, on_step=steps.append)
    tiny.ask("text", PROMPT, SamplingParams(3))
    start_ns = monotonic_ns()
    tiny.drain()
    # 4 and 1 tokens of the prompt, with which the first token is there; the third is not read again.
    assert [(step.sequences, step.prompt_tokens, step.answer_tokens) for step in steps] == [
        (1, 4, 0),
        (1, 1, 0),
        (1, 0, 1),
        (1, 0, 1),
    ]
    assert all(step.seconds > 0 for step in steps)
    assert sum(step.seconds for step in steps) < (monotonic_ns() - start_ns) * 1e-9


def test_steps_add_up_to_what_the_engine_counts(models: Models) -> None:
    """With guesses, and with too few blocks for all, so that some give way."""
    steps: list[Step] = []
    tiny = TinyEngine(models.engine, blocks=10, max_draft_tokens=3, on_step=steps.append)
    again = [Text((10, 11, 12, 10, 11, 12, 10, 11))]
    asked = [tiny.ask(str(number), again, SamplingParams(24)) for number in range(3)]
    tiny.drain()
    assert all(each.finished for each in asked)
    stats = tiny.engine.stats()
    assert sum(step.preemptions for step in steps) == stats.totals.preemptions > 0
    assert sum(step.draft_tokens for step in steps) == stats.totals.draft_tokens > 0
    assert sum(step.accepted_draft_tokens for step in steps) == stats.totals.accepted_draft_tokens
    assert sum(step.prompt_tokens + step.answer_tokens for step in steps) == stats.totals.tokens
    assert len(steps) == len(tiny.runner.steps)
