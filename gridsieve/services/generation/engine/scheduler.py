"""Decides which tokens of which requests the next step computes, and which requests give up cache blocks.

A step computes at most `max_num_batched_tokens`. They are assigned in this order: one token and then draft tokens for
each running request that decodes, prompts of running requests, newly admitted prompts, each in order of arrival. The
rest goes to what is before media, or parts of media, that have not arrived.

    requests with blocks          when they lose them
    running                       last, newest first, and only to an older request: it waits and is recomputed
    waiting (media arrived)       before any running request
    awaiting media                first; what is before its missing media is not prefilled again until they arrive

Prefix cache hits replace computation (`kv_cache/prefixes.py`). A request that reuses media rows without having received
them cannot recompute them, so these blocks are pinned until it ends. Blocks are pinned only while the largest request
fits beside all pinned blocks, so the oldest request can always run; a larger request that arrives later waits until
the pins are released.

Models with recurrent states need a slot for the state of each request, and one for each chunk, which writes the state
after it; further ones keep the states after media and prompts, so that other requests begin there. Slots are taken from
requests that do not run, as blocks are. There are two for each running request, so they are never short.
A chunk with draft tokens writes a third one, if it is free, with the state before them: if any is rejected, the next
chunk computes the accepted ones again, together with new draft tokens.

Live sessions own all their blocks from their opening to their end, at most `live_blocks` together. An opening waits for
blocks that running requests leave, as a prompt does, and gets them before the prompts that wait. The request of a
session borrows them: it needs no others, has nothing of the prefix cache, and is never preempted. With recurrent states
a session keeps one more, after its rows, which its request begins with and replaces if anything of it stays; a session
is opened only while all running requests have their two beside those of sessions and of pinned blocks.

A prompt is admitted only if it fits beside what running requests still have to prefill, so only growing answers cause
preemption. The scheduler knows neither the model nor torch.
Sources: continuous batching, Orca (OSDI 2022); chunked prefill, Sarathi-Serve, arXiv 2403.02310.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter

from gridsieve.common.contract.errors import Overloaded
from gridsieve.services.generation.engine.speculation import Drafts, PromptLookup
from gridsieve.services.generation.kv_cache.blocks import BlockAllocator
from gridsieve.services.generation.kv_cache.prefixes import PrefixCache
from gridsieve.services.generation.kv_cache.state_slots import StateSlots
from gridsieve.services.generation.request.batch import Chunk
from gridsieve.services.generation.request.encoded_media import EncodedMedia
from gridsieve.services.generation.request.request import NO_STATE, BlockTable, Request, Status
from gridsieve.services.generation.request.session import Session

BY_ARRIVAL = attrgetter("arrival")


class Scheduler:
    """Owns the queues of requests and their blocks. Each queue is sorted by arrival, oldest first.

    max_num_batched_tokens: tokens of one step. max_num_seqs: running requests. max_draft_tokens: per request and step.
    states: slots of recurrent states, at least 2 · max_num_seqs; None for models without any.
    drafts: where draft tokens come from; None: the prompt and the answer.
    live_blocks: the most that live sessions may own.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_draft_tokens: int = 0,
        states: StateSlots | None = None,
        drafts: Drafts | None = None,
        live_blocks: int = 0,
    ) -> None:
        assert states is None or states.total >= 2 * max_num_seqs
        self.allocator = allocator
        self.states = states
        self._prefix_cache = PrefixCache(allocator, states)
        self._pins: Counter[int] = Counter()  # how many requests have pinned each block
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._max_draft_tokens = max_draft_tokens
        self._drafts = drafts or PromptLookup()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.awaiting_media: list[Request] = []
        self.awaiting_sibling: list[Request] = []
        self.sessions: list[Session] = []
        self.opening: list[Session] = []
        self.preemptions = 0
        self._live_blocks = live_blocks
        self._queues = {
            Status.RUNNING: self.running,
            Status.WAITING: self.waiting,
            Status.AWAITING_MEDIA: self.awaiting_media,
            Status.AWAITING_SIBLING: self.awaiting_sibling,
        }

    def add(self, request: Request, encoded_media: Sequence[EncodedMedia]) -> None:
        """Queues a new request and its siblings, and gives it the media whose rows are in the cache.

        The request's `max_tokens` must fit into the whole cache. encoded_media: what is known of its first media items.
        """
        if request.session:
            assert request.max_tokens <= len(request.session.blocks) * self.allocator.block_tokens
            request.blocks = BlockTable(request.session.blocks)
            request.num_computed_tokens = request.session.held
            if self.states:
                if not request.session.held:  # it has begun again
                    self._drop_state_of(request.session)
                request.state = self.states.incref(request.session.state)
            self._enter(request, Status.WAITING)
            return
        assert self.allocator.blocks_for(request.max_tokens) <= self._shared_blocks, f"{request} can never fit"
        items, found = self._prefix_cache.lookup_media(request, encoded_media) if encoded_media else (0, [])
        blocks = [each.block for each in found]
        state = self.states.snapshot(found[-1].serial) if self.states and found else NO_STATE
        assert state is not None
        if items and self._can_pin(request, blocks, state):
            for index, encoded in enumerate(encoded_media[:items]):
                request.reuse_media(index, encoded)
            self._pin(request, blocks, state)
        self._prefix_cache.reuse(request)
        self._enter(request, Status.WAITING if request.prompt.complete else Status.AWAITING_MEDIA)
        for sibling in request.siblings:
            self._enter(sibling, Status.AWAITING_SIBLING)

    def open(self, session: Session) -> None:
        """Queues a live session for its blocks, see `opened`.

        Raises Overloaded if it may not have them, or if no recurrent state is left for it.
        """
        others = (*self.sessions, *self.opening)
        owned = sum(each.num_blocks for each in others)
        if owned + session.num_blocks > self._live_blocks:
            size = self.allocator.block_tokens
            raise Overloaded(
                f"{len(others)} live sessions have {owned * size} tokens of the KV cache, "
                f"{session.num_blocks * size} more would exceed --live-tokens {self._live_blocks * size}"
            )
        pinned_states = self._pinned_states()
        if not self._states_suffice(len(others) + 1, pinned_states):
            raise Overloaded(
                f"{len(others)} live sessions and {len(pinned_states)} cached prefixes have all the recurrent "
                f"states that running requests leave (--state-slots)"
            )
        self.opening.append(session)

    def opened(self) -> list[Session]:
        """The sessions that get their blocks now, first come first served. Requests that do not run may lose theirs."""
        opened = []
        while self.opening and self.opening[0].num_blocks <= self._available((*self.waiting, *self.awaiting_media)):
            session = self.opening.pop(0)
            while self.allocator.free < session.num_blocks and (victim := self._reclaimable()):
                self._reclaim(victim)
            session.blocks = self.allocator.allocate(session.num_blocks)
            self.sessions.append(session)
            opened.append(session)
        return opened

    def close(self, session: Session) -> None:
        """Takes the blocks and the state of a live session that has no request."""
        if session in self.opening:
            self.opening.remove(session)
        elif session in self.sessions:
            self.sessions.remove(session)
            self._drop_state_of(session)
            self.allocator.decref(session.blocks)
            session.blocks = []

    def request_of(self, session: Session) -> Request | None:
        """The request that computes a segment of a live session."""
        return next((request for request in self.requests() if request.session is session), None)

    def start_siblings(self, request: Request) -> None:
        """Queues the siblings of a request that has prefilled their prompt and still has its blocks."""
        for sibling in (each for each in request.siblings if each.status is Status.AWAITING_SIBLING):
            self._pin(sibling, request.blocks[: request.num_pinned_blocks], request.pinned_state)
            self.awaiting_sibling.remove(sibling)
            self._enter(sibling, Status.WAITING)
        request.siblings = []

    def media_arrived(self, request: Request) -> None:
        """Queues a request if all its media have arrived. Else what the cache has of them need not be computed."""
        if not request.prompt.complete:
            self._prefix_cache.reuse(request)
            return
        self.awaiting_media.remove(request)
        self._enter(request, Status.WAITING)

    def shorten(self, chunk: Chunk) -> None:
        """Records that a chunk has fewer draft tokens than were scheduled."""
        if self.states:
            *saves, (_, last) = chunk.request.next_states
            chunk.request.next_states = [*(each for each in saves if each[0] < chunk.end), (chunk.end, last)]
            self._drop([each for each in saves if each[0] >= chunk.end])

    def mark_rejected(self, chunk: Chunk) -> None:
        """Records that the rest of a chunk's draft tokens are not part of the answer."""
        self._drop(chunk.request.next_states)

    def mark_computed(self, chunk: Chunk, accepted: int = 0) -> None:
        """Records that the device computes a chunk, or that so many of its draft tokens were added to the answer.

        With recurrent states, only tokens after which the chunk wrote the state count: others are computed again.
        """
        tokens = chunk.known_end + accepted
        if self.states is None or self._take_states(chunk, tokens):
            chunk.request.num_computed_tokens = tokens
            if not chunk.request.session:
                self._prefix_cache.cache_full_blocks(chunk.request)

    def remove(self, request: Request) -> None:
        """Removes a request, finished or not, and frees its blocks."""
        self._queues[request.status].remove(request)
        if request.session:
            if request.session.end(request.num_computed_tokens, request.output_ids):
                request.session.state, request.state = request.state, request.session.state
            self._drop([(0, request.state), *request.next_states])
            request.state, request.next_states = NO_STATE, []
            request.blocks = BlockTable()
            request.move_to(Status.DONE)
            return
        self._pins -= Counter(request.blocks[: request.num_pinned_blocks])
        request.num_pinned_blocks = 0
        pinned, request.pinned_state = request.pinned_state, NO_STATE
        self._release(request)
        self._drop([(0, pinned)])
        request.move_to(Status.DONE)

    def requests(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting
        yield from self.awaiting_media
        yield from self.awaiting_sibling

    def check_integrity(self) -> None:
        """Asserts that no block is lost or miscounted, and that each request has the blocks it needs and no more."""
        alone = [request for request in self.requests() if not request.session]
        self.allocator.check_integrity(chain((each.blocks for each in alone), (each.blocks for each in self.sessions)))
        for request in alone:
            needed = self.allocator.blocks_for(request.num_computed_tokens)
            assert len(request.blocks) >= needed, f"{request} lacks blocks"
            most = self.allocator.blocks_for(request.tokens + self._max_draft_tokens)
            assert len(request.blocks) <= most, f"{request} has more blocks than tokens"
            cached = request.num_cached_blocks
            assert request.num_pinned_blocks <= cached <= len(request.blocks), f"{request} pins blocks out of the cache"
        pinned = Counter(block for request in self.requests() for block in request.blocks[: request.num_pinned_blocks])
        assert pinned == self._pins, "pins differ from the pinned blocks of requests"
        if self.states:
            held = (slot for request in self.requests() for slot in _slots_of(request))
            self.states.check_integrity(chain(held, (each.state for each in self.sessions)))

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, with blocks allocated; empty if nothing can run until something arrives."""
        chunks = list(self._allocate(self._assign_tokens()))
        if not chunks and self.waiting:
            # The newest request preempted itself, because its chunk did not fit; an older one may use its blocks.
            chunks = list(self._allocate(self._assign_tokens()))
        # The oldest request that can run is always among them: it is admitted and served first and may preempt any
        # other. Only blocks pinned by requests that await media are out of its reach.
        if not chunks:
            pinned = any(request.num_pinned_blocks for request in self.awaiting_media)
            unread = any(request.num_unread for request in (*self.running, *self.waiting))
            assert pinned or unread or not (self.running or self.waiting), "requests can run, none is scheduled"
        self._assign_states(chunks)
        early = self._prefill_before_media(chunks)
        self._assign_states(early)
        for chunk in (*chunks, *early):
            self._save_states(chunk)
        return chunks + early

    # --- assigning tokens --------------------------------------------------------------------------------------

    def _assign_tokens(self) -> list[Chunk]:
        budget = self._max_num_batched_tokens
        chunks: list[Chunk] = []
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running:
            tokens = request.tokens
            if tokens <= request.max_tokens:  # else its last token is sampled and not yet read
                (decodes if self._decodes(request) else prefills).append(request)
        # Draft tokens get half of what decodes leave, so that they cannot keep prompts from being prefilled.
        draft_budget = (budget - sum(request.tokens - request.num_computed_tokens for request in decodes)) // 2
        self._drafts.begin_step(len(decodes))
        for request in decodes:
            limit = min(self._max_draft_tokens, draft_budget, request.max_tokens - request.tokens)
            draft_tokens = self._drafts.propose(request, limit) if limit > 0 else ()
            draft_budget -= len(draft_tokens)
            if budget:
                chunks.append(_chunk(request, budget, draft_tokens))
                budget -= chunks[-1].tokens
        for request in prefills:
            if not budget:
                return chunks
            chunks.append(_chunk(request, budget))
            budget -= chunks[-1].tokens
        while budget and (admitted := self._admit()):
            chunks.append(_chunk(admitted, budget))
            budget -= chunks[-1].tokens
        return chunks

    def _decodes(self, request: Request) -> bool:
        """Whether one token is to be computed, or after it draft tokens that were accepted in the last step."""
        missing = request.tokens - request.num_computed_tokens
        return missing == 1 or (
            request.num_computed_tokens >= request.prompt.tokens and missing <= 1 + self._max_draft_tokens
        )

    def _admit(self) -> Request | None:
        """Moves the oldest waiting request to the running ones, if its blocks fit; else the oldest one of a session."""
        if not self.waiting or len(self.running) == self._max_num_seqs:
            return None
        request = self.waiting[0]
        if request.num_unread:  # preempted while its token is computed, which may be its last
            return None
        if not request.session:
            self._prefix_cache.reuse(request)
        available = self._available((*self.waiting[1:], *self.awaiting_media))
        available -= sum(each.num_blocks for each in self.opening)
        growing = any(not each.session for each in self.running)
        if growing and not request.session and self._missing_blocks(request, request.tokens) > available:
            # A session owns its blocks: its request takes none from the oldest request, which is asked first each time.
            of_sessions = [each for each in self.waiting if each.session and not each.num_unread]
            if not of_sessions:
                return None
            request = of_sessions[0]
        self.waiting.remove(request)
        self._enter(request, Status.RUNNING)
        return request

    def _available(self, not_running: Iterable[Request]) -> int:
        """Blocks that running requests leave. not_running: those that may lose theirs."""
        promised = sum(self._missing_blocks(each, each.tokens) for each in self.running)
        lost = [each.blocks[each.num_pinned_blocks :] for each in not_running if not each.session]
        # One block for each running request to grow into: otherwise its next token would preempt what is admitted.
        growing = sum(not each.session for each in self.running)
        return self.allocator.free + sum(map(self.allocator.exclusive, lost)) - promised - growing

    def _enter(self, request: Request, status: Status) -> None:
        request.move_to(status)
        insort(self._queues[status], request, key=BY_ARRIVAL)

    def _prefill_before_media(self, others: Sequence[Chunk]) -> list[Chunk]:
        """Chunks before missing media, within tokens and free blocks that no other request needs now."""
        chunks: list[Chunk] = []
        if not self.awaiting_media:
            return chunks
        budget = self._max_num_batched_tokens - sum(chunk.tokens for chunk in others)
        if not budget:
            return chunks
        promised = sum(self._missing_blocks(other, other.tokens) for other in (*self.running, *self.waiting))
        for request in self.awaiting_media:
            spare = max(0, self.allocator.free - promised)
            start = request.num_computed_tokens
            fitting = (len(request.blocks) + spare) * self.allocator.block_tokens
            # Whole blocks: what is left over costs no more together with the media, and a step by itself now.
            end = self._whole_blocks(min(start + budget, fitting, request.early_tokens))
            if request.reclaimed or end <= start:
                continue
            if self.states and self.states.free <= len(chunks):
                break
            chunks.append(Chunk(request, start, end, samples=False))
            request.blocks += self.allocator.allocate(self._missing_blocks(request, end))
            budget -= end - start
            if not budget:
                break
        return chunks

    # --- assigning blocks --------------------------------------------------------------------------------------

    def _allocate(self, chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        """Yields the chunks that got their blocks. Oldest first, so a chunk never loses blocks to a later one."""
        block_tokens = self.allocator.block_tokens
        for chunk in sorted(chunks, key=attrgetter("request.arrival")):
            request = chunk.request
            if request.status is Status.RUNNING and chunk.end <= len(request.blocks) * block_tokens:
                yield chunk
                continue
            if chunk.draft_tokens and self._missing_blocks(request, chunk.end) > self.allocator.free:
                chunk = _chunk(request, chunk.known_end - chunk.start)  # no request is preempted for draft tokens
            if request.status is Status.RUNNING and self._free_blocks(request, chunk.end):
                request.blocks += self.allocator.allocate(self._missing_blocks(request, chunk.end))
                yield chunk

    def _free_blocks(self, request: Request, tokens: int) -> bool:
        """Takes blocks from other requests until this one can have `tokens`.

        Returns False if it is itself the newest running request and was preempted.
        """
        while self._missing_blocks(request, tokens) > self.allocator.free:
            victim = self._reclaimable()
            if victim:
                self._reclaim(victim)
                continue
            victim = self._newest()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _reclaimable(self) -> Request | None:
        """The newest request that has blocks without running; requests awaiting media before waiting ones."""
        for queue in (self.awaiting_media, self.waiting):
            for request in reversed(queue):
                if not request.session and len(request.blocks) > request.num_pinned_blocks:
                    return request
        return None

    def _newest(self) -> Request:
        """The newest running request with blocks of its own."""
        return next(request for request in reversed(self.running) if not request.session)

    # --- assigning states --------------------------------------------------------------------------------------

    def _assign_states(self, chunks: Sequence[Chunk]) -> None:
        """Gives each chunk the slot that it writes, taking slots from requests that do not run."""
        if self.states is None:
            return
        while self.states.free < len(chunks) and (victim := self._reclaimable()):
            self._reclaim(victim)
        if self.states.free < len(chunks):
            for request in self.requests():
                self._drop(request.saved_states)
        for chunk in chunks:
            assert not chunk.request.next_states, f"{chunk.request} has a step that was not recorded"
            chunk.request.next_states = [(chunk.end, self.states.allocate())]

    def _save_states(self, chunk: Chunk) -> None:
        """Adds slots for the states within a chunk: before its draft tokens, and where other requests may begin."""
        if self.states is None:
            return
        for tokens in dict.fromkeys((chunk.known_end, *sorted(self._worth_saving(chunk)))):
            if tokens < chunk.end and self.states.free:
                chunk.request.next_states.append((tokens, self.states.allocate()))
        chunk.request.next_states.sort()

    def _worth_saving(self, chunk: Chunk) -> set[int]:
        """The places within a chunk where other requests may begin with its state, in tokens of the sequence.

        Each is the end of a block: before and after a media item; where another request's prompt was found to part
        from this one; the last two of the prompt, because chat templates end it with tokens, such as `<think>`, that
        they leave out of earlier turns; and the last one of the answer. None of live sessions, which no other finds.
        """
        if chunk.request.session:
            return set()
        request, prompt = chunk.request, chunk.request.prompt
        wanted = [end for end in (chunk.known_end, chunk.end) if end > prompt.tokens]
        if chunk.start < prompt.tokens:
            end = prompt.tokens - 1 if prompt.complete else prompt.ready
            wanted += [end, end - self.allocator.block_tokens, request.shared_tokens]
            for span in prompt.spans:
                if not span.first_row:
                    wanted.append(span.offset)
                if span.first_row + span.length == prompt.num_kept[span.media_index]:
                    wanted.append(span.end)
        whole = {self._whole_blocks(tokens) for tokens in wanted}
        return {tokens for tokens in whole if chunk.start < tokens <= chunk.end}

    def _take_states(self, chunk: Chunk, tokens: int) -> bool:
        """Records that a chunk's slots are written, up to the state after `tokens`. False if that has no slot."""
        assert self.states
        request = chunk.request
        slot = dict(request.next_states).get(tokens)
        if slot is None:
            return False
        written, worth = [each for each in request.next_states if each[0] <= tokens], self._worth_saving(chunk)
        request.saved_states += [(place, self.states.incref(each)) for place, each in written if place in worth]
        del request.next_states[: len(written)]
        before, request.state = request.state, self.states.incref(slot)
        self._drop([(0, before), *written])
        return True

    def _pinned_states(self, state: int = NO_STATE) -> set[int]:
        """Those at the end of the pinned blocks of requests, and one more."""
        return {state, *(each.pinned_state for each in self.requests())} - {NO_STATE}

    def _states_suffice(self, sessions: int, pinned_states: set[int]) -> bool:
        """Whether all running requests have two beside those of live sessions and the pinned ones."""
        needed = 2 * self._max_num_seqs + sessions + len(pinned_states)
        return self.states is None or needed <= self.states.total

    def _drop_state_of(self, session: Session) -> None:
        self._drop([(0, session.state)])
        session.state = NO_STATE

    def _drop(self, states: list[tuple[int, int]]) -> None:
        """Drops the references to slots, and empties the list."""
        for _, slot in states:
            if self.states:
                self.states.decref(slot)
        states.clear()

    def _reclaim(self, request: Request) -> None:
        request.reclaimed = True
        self._release(request)

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self.running.remove(request)
        self._reclaim(request)
        self._enter(request, Status.WAITING)

    def _release(self, request: Request) -> None:
        """Drops all blocks except the pinned ones."""
        pinned = request.num_pinned_blocks
        self.allocator.decref(request.blocks[pinned:])
        del request.blocks[pinned:]
        request.num_computed_tokens = pinned * self.allocator.block_tokens
        request.num_cached_blocks = pinned
        request.parent_serial = self.allocator.serial_of(request.blocks[-1]) if pinned else request.root
        if self.states:
            self._drop([(0, request.state), *request.next_states, *request.saved_states])
            request.state = self.states.incref(request.pinned_state)
            request.next_states, request.saved_states = [], []

    def _can_pin(self, request: Request, blocks: Sequence[int], state: int) -> bool:
        """Whether every request still fits into the cache beside all pinned blocks, and its states beside all pinned
        ones."""
        if not self._states_suffice(len(self.sessions) + len(self.opening), self._pinned_states(state)):
            return False
        pinned = len(self._pins.keys() | set(blocks))
        return all(
            pinned + self.allocator.blocks_for(other.max_tokens) <= self._shared_blocks
            for other in (request, *self.requests())
            if not other.session
        )

    def _pin(self, request: Request, blocks: Sequence[int], state: int) -> None:
        """Gives a request without blocks the first blocks of its prompt, and pins them and the state after them."""
        if self.states:
            request.pinned_state = self.states.incref(state)
        self.allocator.incref(blocks)
        request.blocks, request.num_pinned_blocks = BlockTable(blocks), len(blocks)
        request.cached_tokens = len(blocks) * self.allocator.block_tokens
        self._pins.update(blocks)
        self._release(request)  # sets its counters to the pinned blocks

    @property
    def _shared_blocks(self) -> int:
        """Those that live sessions leave in any case."""
        return self.allocator.total - self._live_blocks

    def _whole_blocks(self, tokens: int) -> int:
        return tokens - tokens % self.allocator.block_tokens

    def _missing_blocks(self, request: Request, tokens: int) -> int:
        return max(0, self.allocator.blocks_for(tokens) - len(request.blocks))


def _slots_of(request: Request) -> tuple[int, ...]:
    """Slots of recurrent states that a request holds, each as often as it does."""
    both = (*request.next_states, *request.saved_states)
    return (request.state, request.pinned_state, *(slot for _, slot in both))


def _chunk(request: Request, budget: int, draft_tokens: tuple[int, ...] = ()) -> Chunk:
    """As many of a request's next tokens as fit; if all do, draft tokens may follow."""
    start = request.num_computed_tokens
    end = min(start + budget, request.tokens)
    return Chunk(request, start, end + len(draft_tokens), end == request.tokens, draft_tokens)
