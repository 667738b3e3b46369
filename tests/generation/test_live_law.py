"""The law of live sessions: an answer equals one forward over all rows of the session, ever, in which each row sees
those that the cache held when it was computed. Evictions, chunks and neighbours change nothing else. With a recurrent
state nothing is evicted: a session begins again, and the law holds from there on."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from gridsieve.common.contract.errors import Overloaded
from gridsieve.common.contract.plan import Run
from gridsieve.services.generation.request.request import Event, Failed, Finished, Request
from gridsieve.services.generation.request.session import Segment, Session
from gridsieve.services.generation.sampling.sampler import SamplingParams
from tests.families import text_and_head
from tests.law import LOGPROB_TOLERANCE
from tests.oracle import LiveRows, Text
from tests.tiny import BLOCK_TOKENS, PAD_ID, Models, TinyEngine, load_models

LAW = settings(max_examples=7, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
FAMILIES = pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"], scope="module")
RECURRENT = pytest.mark.parametrize("family", ["qwen3_5"], scope="module")


@pytest.fixture(scope="module")
def models(family: str, tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return load_models(family, tmp_path_factory.mktemp(family))


@dataclass(frozen=True)
class Added:
    """A slice, of media rows after text, or a question (new_tokens above 0) of text alone."""

    text: int
    media: int = 0
    new_tokens: int = 0
    transient: bool = False


@dataclass
class Watched:
    """A session of an engine, and what it must have computed."""

    models: Models
    engine: TinyEngine
    window: int
    answer: int = 16
    session: Session = field(init=False)
    expected: LiveRows = field(default_factory=LiveRows)
    lengths: list[int] = field(default_factory=list)  # rows of each segment that stayed
    computed: list[tuple[LiveRows, int, torch.Tensor]] = field(
        default_factory=list
    )  # rows before, logits from there on
    first: int = 1
    evicted: int = 0
    gone: int = 0  # rows that were evicted, or there when the session began again
    next_position: int = 0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))

    def __post_init__(self) -> None:
        self.session = Session("watched", self.window, self.answer, BLOCK_TOKENS)
        finished(self.engine, self.engine.engine.open(self.session.lease))

    def add(self, added: Added, neighbours: tuple[tuple[int, int], ...] = (), steps: int = 5000) -> None:
        """Adds a segment, and computes it beside other requests, of so many tokens and new tokens each.

        steps: after which it is cancelled, without being computed as a whole or with a part of its answer.
        """
        number, session = len(self.computed), self.session
        needed = session.held + (0 if added.new_tokens else len(session.unsaid) + added.text + added.media)
        if self.models.engine.states and needed > self.window:
            self._begin_again()
        ids = [*session.unsaid, *self.random.integers(10, 300, added.text).tolist(), *[PAD_ID] * added.media]
        text = len(ids) - added.media
        levels = 1 + self.models.engine.embed_levels
        embeds = self.random.normal(0, 0.3, (levels, added.media, self.models.family.hidden)).astype(np.float32)
        start = self.next_position
        places = [(start + row,) * 3 for row in range(text)]
        places += [(start + text + row // 5, start + text, start + text + row % 3) for row in range(added.media)]
        after = max((max(place) for place in places), default=start - 1) + 1 + 2 * bool(added.media)  # pruned rows
        session.evict(0 if added.new_tokens else len(ids), before=0)
        self._evict(0 if added.new_tokens else len(ids))
        segment = Segment(
            np.array(ids, np.int32),
            np.array(places, np.int32).T,
            after,
            (Run(text, added.media),) if added.media else (),
            torch.from_numpy(embeds) if added.media else None,
            keeps_answer=bool(added.new_tokens),
            transient=added.transient,
        )
        events: list[Event] = []
        prompt = session.begin(segment, self.models.engine.embed_levels)
        keys = (b"",) * len(prompt.plan.media)
        params = SamplingParams(max(1, added.new_tokens))
        request = Request(f"live {number}", prompt, keys, params, None, events.append, holding=session.borrowed())
        request.embeds = [segment.embeds] if added.media else []
        self.engine.engine.submit(request)
        for place, (tokens, new_tokens) in enumerate(neighbours):
            other = (Text(tuple(self.random.integers(10, 300, tokens).tolist())),)
            self.engine.ask(f"other {number}, {place}", other, SamplingParams(new_tokens))
        for _ in range(steps):
            self.engine.engine.step()
            self.engine.engine.check_integrity()
            if any(isinstance(each, Finished | Failed) for each in events):
                break
        else:
            finished(self.engine, self.engine.engine.interrupt(request))
        if not request.output_ids:
            return
        rows, said = self._rows(), request.output_ids
        for row, token in enumerate([*ids, *said[:-1]]):
            if row >= text and row < len(ids):
                rows.embeds[len(rows.ids)] = embeds[:, row - text]
            rows.ids.append(token)
            rows.positions.append(places[row] if row < len(ids) else (after + row - len(ids),) * 3)
            rows.oldest.append(rows.pinned + self.evicted)
        last = len(self.expected.ids) + len(ids) - 1
        if not self.lengths:  # the first segment decides which rows are pinned, and is computed before any is evicted
            rows.pinned = -(-len(ids) // BLOCK_TOKENS) * BLOCK_TOKENS
        self.computed.append((rows, last, torch.stack(self.engine.runner.logits[request.id])))
        if added.transient:
            return
        stays = len(ids) + (len(said) - 1 if added.new_tokens else 0)
        self.expected = rows
        self.lengths.append(stays)
        self.next_position = after + stays - len(ids)
        assert session.next_position == self.next_position
        if len(self.lengths) == 1:
            self.expected.pinned = -(-stays // BLOCK_TOKENS) * BLOCK_TOKENS
            self.expected.oldest = [self.expected.pinned] * stays

    def check(self) -> None:
        """Compares all that was computed with the oracle."""
        text_model, lm_head = text_and_head(self.models.reference)
        for rows, last, logits in self.computed:
            reference = rows.logprobs(text_model, lm_head)[last : last + len(logits)]
            worst = float((logits.log_softmax(dim=-1) - reference).abs().max())
            assert worst < LOGPROB_TOLERANCE, f"{worst} off"

    def close(self) -> None:
        self.engine.engine.close(self.session.lease)
        self.engine.drain()
        self.engine.engine.check_integrity()
        stats = self.engine.engine.stats()
        assert (stats.blocks_used, stats.states_used) == (0, 0)

    def _begin_again(self) -> None:
        self.session.forget()
        self.gone += sum(self.lengths)
        self.expected, self.lengths = LiveRows(), []
        self.first, self.evicted, self.next_position = 1, 0, 0

    def _rows(self) -> LiveRows:
        kept = self.expected
        return LiveRows(kept.pinned, [*kept.ids], dict(kept.embeds), [*kept.positions], [*kept.oldest])

    def _evict(self, rows: int) -> None:
        """Whole blocks of the oldest segments go, in numbers of all rows that ever were."""
        total, pinned = sum(self.lengths), self.expected.pinned
        while total - self.evicted + rows > self.window and self.first < len(self.lengths):
            self.first += 1
            before, self.evicted = self.evicted, max(0, sum(self.lengths[: self.first]) - pinned)
            self.evicted -= self.evicted % BLOCK_TOKENS
            self.gone += self.evicted - before


def finished(engine: TinyEngine, future: Future[None]) -> None:
    engine.engine.step()
    future.result(timeout=0)


def added() -> st.SearchStrategy[Added]:
    slices = st.builds(Added, text=st.integers(1, 6), media=st.integers(0, 12))
    bare = st.builds(Added, text=st.just(0), media=st.integers(1, 12))
    asked = st.builds(Added, text=st.integers(1, 6), new_tokens=st.integers(1, 8), transient=st.booleans())
    return slices | bare | slices | asked


@LAW
@given(st.data())
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"], scope="module")
def test_answers_of_a_session_obey_the_law(models: Models, data: st.DataObject) -> None:
    obey_the_law(models, data)


@settings(LAW, max_examples=4)  # its steps take three times as long
@given(st.data())
@RECURRENT
def test_answers_of_a_session_with_a_recurrent_state_obey_the_law(models: Models, data: st.DataObject) -> None:
    obey_the_law(models, data)


@pytest.mark.deep
@pytest.mark.timeout(3600)
@settings(LAW, max_examples=100)
@given(st.data())
@FAMILIES
def test_answers_of_many_sessions_obey_the_law(models: Models, data: st.DataObject) -> None:
    obey_the_law(models, data)


def obey_the_law(models: Models, data: st.DataObject) -> None:
    window = data.draw(st.sampled_from((36, 41, 60)))
    engine = TinyEngine(
        models.engine,
        blocks=40,
        max_num_batched_tokens=data.draw(st.sampled_from((3, 8, 64))),
        max_draft_tokens=data.draw(st.sampled_from((0, 0, 2))),
        overlap=data.draw(st.booleans()),
        live_blocks=20,
    )
    watched = Watched(models, engine, window)
    others = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), max_size=3).map(tuple)
    for each in data.draw(st.lists(added(), min_size=6, max_size=11)):
        watched.add(each, data.draw(others))
    engine.drain()
    event(f"evicted: {watched.gone > 0}, preempted: {engine.totals['preemptions'] > 0}")
    watched.check()
    watched.close()


@FAMILIES
def test_a_long_session_keeps_its_first_segment_and_its_blocks(models: Models) -> None:
    engine = TinyEngine(models.engine, blocks=32, live_blocks=14)
    watched = Watched(models, engine, 40)
    for number in range(24):
        watched.add(Added(text=2, media=7))
        if number % 6 == 5:
            watched.add(Added(text=3, new_tokens=6))
        assert engine.engine.stats().blocks_used == watched.session.lease.num_blocks
        assert watched.session.held <= 40 + 16
    assert watched.gone > 100
    assert watched.session.numbers.tolist()[:9] == [0] * 9
    watched.check()
    watched.close()


@RECURRENT
def test_what_is_cancelled_or_fails_leaves_the_recurrent_state_as_it_was(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question that is cancelled before it is computed, one within its answer, and a slice that fails."""
    engine = TinyEngine(models.engine, blocks=32, max_num_batched_tokens=4, live_blocks=16)
    watched = Watched(models, engine, 48)
    watched.add(Added(text=2, media=7))
    watched.add(Added(text=9, new_tokens=4), steps=2)
    assert watched.session.held == 9
    watched.add(Added(text=3, new_tokens=8), steps=4)
    assert watched.session.count == 2
    forward = engine.runner.forward

    def fail(*_: object) -> torch.Tensor:
        monkeypatch.setattr(engine.runner, "forward", forward)
        raise RuntimeError("injected")

    monkeypatch.setattr(engine.runner, "forward", fail)
    watched.add(Added(text=2, media=7))
    assert watched.session.count == 2
    watched.add(Added(text=2, media=7))
    watched.add(Added(text=3, new_tokens=4))
    watched.check()
    watched.close()


@RECURRENT
def test_sessions_leave_two_recurrent_states_to_each_request_that_runs(models: Models) -> None:
    engine = TinyEngine(models.engine, blocks=64, max_num_seqs=2, snapshots=1, live_blocks=32)
    watched = Watched(models, engine, 40)
    with pytest.raises(Overloaded, match="--state-slots"):
        finished(engine, engine.engine.open(Session("too many", 16, 16, BLOCK_TOKENS).lease))
    for _ in range(3):
        watched.add(Added(text=2, media=7), ((20, 6), (12, 8), (9, 4)))
    engine.drain()
    watched.check()
    watched.close()


@pytest.mark.parametrize("family", ["qwen2_5_vl"], scope="module")
def test_a_session_does_not_wait_for_blocks_that_others_lack(models: Models) -> None:
    engine = TinyEngine(models.engine, blocks=32, live_blocks=14)
    watched = Watched(models, engine, 40)
    left = (32 - watched.session.lease.num_blocks) * BLOCK_TOKENS
    for number, tokens in enumerate((left - 20, left - 30)):  # of which the second one has no room beside the first
        first = 10 + 100 * number
        engine.ask(f"{number}", [Text(tuple(range(first, first + tokens)))], SamplingParams(18))
        engine.engine.step()
    watched.add(Added(text=2, media=7), steps=3)
    assert watched.session.count == 1
    watched.check()
    engine.drain()
    watched.close()
