"""The scheduler serves requests in order of arrival. `test_prefixes.py` tests that it loses no blocks."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from gridsieve.services.generation.engine.scheduler import Scheduler
from gridsieve.services.generation.engine.speculation import PromptLookup
from gridsieve.services.generation.memory.blocks import BlockAllocator
from gridsieve.services.generation.memory.lease import Lease
from gridsieve.services.generation.memory.memory import Memory
from gridsieve.services.generation.request.batch import Chunk
from gridsieve.services.generation.request.request import Request, Status
from gridsieve.services.generation.request.session import Segment, Session
from gridsieve.services.generation.sampling.sampler import SamplingParams
from tests.oracle import Item, Text
from tests.tiny import BLOCK_TOKENS, make_request

VIDEO = Item(2, 2, 2, Fraction(1), np.zeros((8, 1), np.float32))


class Desk:
    """A scheduler without a model: every chunk that samples yields a token."""

    def __init__(
        self, blocks: int = 64, max_num_batched_tokens: int = 16, max_num_seqs: int = 8, live_blocks: int = 0
    ) -> None:
        allocator = BlockAllocator(blocks, BLOCK_TOKENS)
        memory = Memory(allocator, max_num_seqs, live_blocks=live_blocks)
        self.scheduler = Scheduler(memory, max_num_batched_tokens, max_num_seqs, 0, PromptLookup())
        self.arrivals = 0

    def add(self, prompt_tokens: int, new_tokens: int, *, video: bool = False, yields: bool = False) -> Request:
        # Prompts share no prefix: `test_prefixes.py` tests sharing.
        parts = [Text((9 + self.arrivals,) * prompt_tokens), *([VIDEO, Text((8,))] if video else [])]
        request = make_request(str(self.arrivals), parts, SamplingParams(new_tokens)).request
        request.yields = yields
        return self._add(request)

    def ask(self, session: Session, tokens: int, new_tokens: int) -> Request:
        segment = Segment(np.full(tokens, 9, np.int32), np.zeros((3, tokens), np.int32), tokens, transient=True)
        prompt, wish = session.begin(segment, 0), SamplingParams(new_tokens)
        return self._add(Request(session.id, prompt, (), wish, None, lambda _: None, holding=session.borrowed()))

    def _add(self, request: Request) -> Request:
        request.arrival = (request.yields, self.arrivals)
        self.arrivals += 1
        self.scheduler.enqueue(request, ())
        return request

    def deliver(self, request: Request) -> None:
        request.prompt.deliver(0, None, 1)
        self.scheduler.media_arrived(request)

    def step(self) -> list[Chunk]:
        chunks = self.scheduler.schedule()
        for chunk in chunks:
            self.scheduler.mark_computed(chunk)
            if chunk.samples:
                chunk.request.output_ids.append(1)
                if len(chunk.request.output_ids) == chunk.request.sampling.max_new_tokens:
                    self.scheduler.remove(chunk.request)
        self.scheduler.check_integrity()
        return chunks


def test_decodes_come_before_prefill_and_older_prompts_before_newer_ones() -> None:
    desk = Desk(max_num_batched_tokens=10)
    first = desk.add(5, 9)
    desk.step()
    second, third = desk.add(21, 9), desk.add(12, 9)
    assert [(w.request, w.start, w.end) for w in desk.step()] == [(first, 5, 6), (second, 0, 9)]
    assert [(w.request, w.start, w.end) for w in desk.step()] == [(first, 6, 7), (second, 9, 18)]
    assert [(w.request, w.start, w.end) for w in desk.step()] == [(first, 7, 8), (second, 18, 21), (third, 0, 6)]


def test_requests_that_yield_give_up_places_and_wait_behind_others() -> None:
    desk = Desk(max_num_seqs=2)
    first, second, third = (desk.add(4, 20, yields=True) for _ in range(3))
    desk.step()
    assert desk.scheduler.running == [first, second]
    question, other = desk.add(4, 2), desk.add(4, 9)
    assert [w.request for w in desk.step()] == [question, first]
    assert desk.scheduler.waiting == [other, second, third]
    assert [w.request for w in desk.step()] == [question, other]
    assert desk.scheduler.waiting == [first, second, third]
    assert [w.request for w in desk.step()] == [other, first]
    while desk.step():
        pass
    assert [len(each.output_ids) for each in (first, second, third, question, other)] == [20, 20, 20, 2, 9]


def test_requests_that_yield_give_up_blocks_that_a_prompt_needs() -> None:
    desk = Desk(blocks=8, max_num_batched_tokens=64, max_num_seqs=4)
    job = desk.add(16, 9, yields=True)
    desk.step()
    question = desk.add(20, 2)
    assert [w.request for w in desk.step()] == [question]
    assert (job.status, desk.scheduler.preemptions) == (Status.WAITING, 1)


def test_text_before_a_late_video_is_prefilled_from_the_spare_budget() -> None:
    desk = Desk(max_num_batched_tokens=10, max_num_seqs=1)
    late = desk.add(10, 2, video=True)
    prompt = desk.add(7, 3)
    assert [(w.request, w.end) for w in desk.step()] == [(prompt, 7)]  # the 3 tokens left fill no block
    assert [(w.request, w.end) for w in desk.step()] == [(prompt, 8), (late, 8)]
    assert late.status is Status.AWAITING_MEDIA
    assert [w.request for w in desk.step()] == [prompt]
    assert desk.step() == []
    desk.deliver(late)
    assert [(w.request, w.start, w.end, w.samples) for w in desk.step()] == [(late, 8, 18, False)]


def test_a_request_awaiting_media_loses_its_blocks_before_one_whose_media_arrived() -> None:
    desk = Desk(blocks=8, max_num_batched_tokens=64, max_num_seqs=1)
    runs = desk.add(7, 14)
    awaits, waits = desk.add(8, 1, video=True), desk.add(8, 1, video=True)
    desk.step()
    desk.deliver(waits)
    while awaits.holding.blocks:
        assert len(waits.holding.blocks) == 2
        desk.step()
    assert runs.status is Status.RUNNING
    assert len(waits.holding.blocks) == 2
    while desk.step():
        assert awaits.holding.blocks == [], "it is prefilled again before its media arrive"
    assert waits.status is Status.DONE
    assert desk.scheduler.preemptions == 0


def test_the_newest_request_is_preempted_and_resumes_before_waiting_ones() -> None:
    desk = Desk(blocks=6, max_num_batched_tokens=64, max_num_seqs=2)
    old, new = desk.add(8, 12), desk.add(12, 12)
    waiting = desk.add(1, 1)
    while not desk.scheduler.preemptions:
        desk.step()
    assert new.status is Status.WAITING
    assert old.status is Status.RUNNING
    tokens = new.tokens
    order = []
    while chunks := desk.step():
        order += [w.request for w in chunks if w.request is not old]
        if new in order:
            assert new.tokens == tokens + 1, "lost blocks are recomputed before the next token"
            break
    assert waiting not in order[: order.index(new)]


def test_a_prompt_is_not_admitted_if_it_would_preempt_another() -> None:
    desk = Desk(blocks=8, max_num_batched_tokens=8)
    desk.add(20, 4)
    desk.step()
    second = desk.add(16, 1)  # needs 4 blocks; 3 are free beside the 5 of the first prompt
    while desk.step():
        pass
    assert second.status is Status.DONE
    assert desk.scheduler.preemptions == 0


def test_a_session_is_opened_once_running_requests_leave_its_blocks_and_preempts_none() -> None:
    """Prompts that come after it wait for longer, however often it is opened and closed."""
    desk = Desk(blocks=16, max_num_batched_tokens=64, live_blocks=8)
    running = [desk.add(16, 8) for _ in range(2)]  # 6 blocks each
    desk.step()
    late = desk.add(16, 1)
    for _ in range(3):
        lease = Lease(8)
        desk.scheduler.open(lease)
        desk.step()
        assert not desk.scheduler.opened()
        desk.scheduler.close(lease)
    desk.scheduler.open(lease)
    while not desk.scheduler.opened():
        assert late.status is Status.WAITING
        assert desk.step()
    assert [each.status for each in running] == [Status.DONE] * 2
    desk.step()
    assert late.status is Status.DONE
    assert desk.scheduler.preemptions == 0


def test_requests_of_sessions_run_before_an_older_prompt_only_while_it_lacks_blocks() -> None:
    """However many there are: whenever a place is free, the prompt is considered first."""
    desk = Desk(blocks=16, max_num_batched_tokens=64, max_num_seqs=2, live_blocks=8)
    sessions = [Session(name, 8, 4, BLOCK_TOKENS) for name in "ab"]
    for session in sessions:
        desk.scheduler.open(session.lease)
    assert desk.scheduler.opened() == [session.lease for session in sessions]
    running = desk.add(16, 5)
    desk.step()
    prompt, of_sessions = desk.add(20, 1), list[Request]()  # needs 5 blocks, 5 are free, and `running` grows
    while prompt.status is Status.WAITING:
        asked = {request.id for request in desk.scheduler.requests()}
        of_sessions += [desk.ask(session, 3, 2) for session in sessions if session.id not in asked]
        lacks_blocks = running.status is Status.RUNNING
        assert (prompt in [chunk.request for chunk in desk.step()]) != lacks_blocks
    assert [each.status for each in of_sessions].count(Status.DONE) >= 2
