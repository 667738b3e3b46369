"""Decides which tokens of which requests the next step computes, and which requests give up cache blocks.

A step computes at most `max_num_batched_tokens`. They are assigned in this order: one token and then draft tokens for
each running request that decodes, prompts of running requests, newly admitted prompts, each in order of arrival. The
rest goes to what is before media, or parts of media, that have not arrived.

    requests with blocks          when they lose them
    running                       last, newest first, and only to an older request: it waits and is recomputed
    waiting (media arrived)       before any running request
    awaiting media                first; what is before its missing media is not prefilled again until they arrive

Slots of recurrent states are taken from requests that do not run, as blocks are. A chunk with draft tokens writes
another one, if it is free, with the state before them: if any is rejected, the next chunk computes the accepted ones
again, together with new draft tokens.

A lease waits for blocks that running requests leave, as a prompt does, and gets them before the prompts that wait. A
request that borrows them needs no others, and is never preempted.

Requests that yield count as newer than all that do not. A running one gives up its place, too, if one that does not
yield waits for it.

A prompt is admitted only if it fits beside what running requests still have to prefill, so only growing answers cause
preemption. The scheduler is policy: `Memory` changes what a request holds. It knows neither the model nor torch.
Sources: continuous batching, Orca (OSDI 2022); chunked prefill, Sarathi-Serve, arXiv 2403.02310.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from operator import attrgetter

from gridsieve.services.generation.engine.snapshots import snapshot_places
from gridsieve.services.generation.engine.speculation import Drafts
from gridsieve.services.generation.memory.lease import Lease
from gridsieve.services.generation.memory.memory import Memory
from gridsieve.services.generation.request.attending import Attending
from gridsieve.services.generation.request.batch import Chunk
from gridsieve.services.generation.request.encoded_media import EncodedMedia
from gridsieve.services.generation.request.request import Request, Status

BY_ARRIVAL = attrgetter("arrival")


class Scheduler:
    """Owns the queues of requests. Each queue is sorted by arrival, oldest first.

    max_num_batched_tokens: tokens of one step. max_num_seqs: running requests. max_draft_tokens: per request and step.
    drafts: where draft tokens come from.
    """

    def __init__(
        self,
        memory: Memory,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_draft_tokens: int,
        drafts: Drafts,
    ) -> None:
        self.memory = memory
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._max_draft_tokens = max_draft_tokens
        self._drafts = drafts
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.awaiting_media: list[Request] = []
        self.awaiting_sibling: list[Request] = []
        self.opening: list[Lease] = []
        self.preemptions = 0
        self._foreseen: Collection[Request] = ()  # for which the step before was read at once
        self._queues = {
            Status.RUNNING: self.running,
            Status.WAITING: self.waiting,
            Status.AWAITING_MEDIA: self.awaiting_media,
            Status.AWAITING_SIBLING: self.awaiting_sibling,
        }

    def enqueue(self, request: Request, encoded_media: Sequence[EncodedMedia]) -> None:
        """Queues a new request and its siblings, and gives it the media whose rows are in the cache.

        The request's `max_tokens` must be within `Memory.capacity_tokens`. encoded_media: what is known of its first
        media items.
        """
        known = request.with_media(encoded_media) if encoded_media else None
        for each in (request, *request.siblings):
            self.memory.begin(each)
        if known:
            prompt, ends = known
            for index in range(self.memory.pin_media(request, prompt, prompt.ready, ends)):
                request.reuse_media(index, encoded_media[index])
        self.memory.reuse(request)
        self._enter(request, Status.WAITING if request.prompt.complete else Status.AWAITING_MEDIA)
        for sibling in request.siblings:
            self._enter(sibling, Status.AWAITING_SIBLING)

    def open(self, lease: Lease) -> None:
        """Queues a lease for its blocks, see `opened`. Raises Overloaded if it may not have them."""
        self.memory.claim(lease)
        self.opening.append(lease)

    def opened(self) -> list[Lease]:
        """The leases that get their blocks now, first come first served. Requests that do not run may lose theirs."""
        opened = []
        while self.opening and self.opening[0].num_blocks <= self.memory.left(
            self.running, (*self.waiting, *self.awaiting_media)
        ):
            lease = self.opening.pop(0)
            while self.memory.free < lease.num_blocks and (victim := self._reclaimable()):
                self.memory.reclaim(victim)
            self.memory.open(lease)
            opened.append(lease)
        return opened

    def close(self, lease: Lease) -> None:
        """Takes the blocks and the state of a lease of which no request borrows."""
        if lease in self.opening:
            self.opening.remove(lease)
        self.memory.close(lease)

    def start_siblings(self, request: Request) -> None:
        """Queues the siblings of a request that has prefilled their prompt and still has its blocks."""
        for sibling in (each for each in request.siblings if each.status is Status.AWAITING_SIBLING):
            self.memory.pin_as(sibling, request)
            self.awaiting_sibling.remove(sibling)
            self._enter(sibling, Status.WAITING)
        request.siblings = []

    def follow(self, attending: Attending, answered: Request) -> None:
        """Queues what computes an answer again, whose request still has its blocks."""
        self.memory.begin(attending)
        self.memory.pin_as(attending, answered)
        self.memory.reuse(attending)
        self._enter(attending, Status.WAITING)

    def media_arrived(self, request: Request) -> None:
        """Queues a request if all its media have arrived. Else what the cache has of them need not be computed."""
        if not request.prompt.complete:
            self.memory.reuse(request)
            return
        self.awaiting_media.remove(request)
        self._enter(request, Status.WAITING)

    def mark_computed(self, chunk: Chunk, accepted: int = 0) -> None:
        """Records that the device computes a chunk, or that so many of its draft tokens were added to the answer."""
        self.memory.mark_computed(chunk.request, chunk.known_end + accepted, self._places(chunk))

    def remove(self, request: Request) -> None:
        """Removes a request, finished or not, and frees its blocks."""
        self._queues[request.status].remove(request)
        self.memory.end(request)
        request.move_to(Status.DONE)

    def requests(self) -> Iterator[Request]:
        return chain.from_iterable(self._queues.values())

    def check_integrity(self) -> None:
        """Asserts that no block is lost or miscounted, and that each request has the blocks it needs and no more."""
        self.memory.check_integrity(self.requests(), self._max_draft_tokens)

    def foresees_drafts(self) -> bool:
        """Whether the next step will have draft tokens, as far as the tokens tell that were read.

        If so, the last step must be read before `schedule`, whose chunks say for which requests that was done.
        """
        self._foreseen = self._propose(self._running()[0]).keys()
        return bool(self._foreseen)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, with blocks allocated; empty if nothing can run until something arrives."""
        chunks = list(self._allocate(self._assign_tokens()))
        if not chunks and self.waiting:
            # The newest request preempted itself, because its chunk did not fit; an older one may use its blocks.
            chunks = list(self._allocate(self._assign_tokens()))
        # The oldest request that can run is always among them: it is admitted and served first and may preempt any
        # other. Only blocks pinned by requests that await media are out of its reach.
        if not chunks:
            pinned = any(request.holding.num_pinned_blocks for request in self.awaiting_media)
            unread = any(request.num_unread for request in (*self.running, *self.waiting))
            assert pinned or unread or not (self.running or self.waiting), "requests can run, none is scheduled"
        self._assign_states(chunks)
        early = self._prefill_before_media(chunks)
        self._assign_states(early)
        if self.memory.states:
            for chunk in (*chunks, *early):
                # Before its draft tokens, and where other requests may begin.
                places = dict.fromkeys((chunk.known_end, *sorted(self._places(chunk))))
                self.memory.save_states(chunk.request, [tokens for tokens in places if tokens < chunk.end])
        return chunks + early

    # --- assigning tokens --------------------------------------------------------------------------------------

    def _assign_tokens(self) -> list[Chunk]:
        self._make_way()
        budget = self._max_num_batched_tokens
        chunks: list[Chunk] = []
        decodes, prefills = self._running()
        # A draft token continues tokens that were read.
        drafts = {} if any(each.num_unread for each in decodes) else self._propose(decodes)
        self._drafts.begin_step(len(decodes))
        for request in decodes:
            if budget:
                drafted = request in drafts or request in self._foreseen
                chunks.append(_chunk(request, budget, drafts.get(request, ()), drafted))
                budget -= chunks[-1].tokens
        self._foreseen = ()
        for request in prefills:
            if not budget:
                return chunks
            chunks.append(_chunk(request, budget))
            budget -= chunks[-1].tokens
        while budget and (admitted := self._admit()):
            chunks.append(_chunk(admitted, budget))
            budget -= chunks[-1].tokens
        return chunks

    def _running(self) -> tuple[list[Request], list[Request]]:
        """The running requests that decode, and the running requests that prefill."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running:
            if request.tokens <= request.max_tokens:  # else its last token is sampled and not yet read
                (decodes if self._decodes(request) else prefills).append(request)
        return decodes, prefills

    def _propose(self, decodes: Sequence[Request]) -> dict[Request, tuple[int, ...]]:
        """Draft tokens of requests that decode; requests without any are left out."""
        if not self._max_draft_tokens:
            return {}
        limits = {each: min(self._max_draft_tokens, each.max_tokens - each.tokens) for each in decodes}
        # They get half of what decodes leave, so that they cannot keep prompts from being prefilled.
        missing = sum(each.tokens - each.holding.num_computed_tokens for each in decodes)
        budget = max(0, self._max_num_batched_tokens - missing) // 2
        found: dict[Request, tuple[int, ...]] = {}
        for request, tokens in self._drafts.propose(limits).items():
            if kept := tokens[:budget]:
                found[request] = kept
                budget -= len(kept)
        return found

    def _decodes(self, request: Request) -> bool:
        """Whether one token is to be computed, or after it draft tokens that were accepted in the last step."""
        computed = request.holding.num_computed_tokens
        missing = request.tokens - computed
        return missing == 1 or (computed >= request.prompt.tokens and missing <= 1 + self._max_draft_tokens)

    def _make_way(self) -> None:
        """Running requests that yield give up their places, if the oldest that waits needs them and does not yield."""
        if not self.waiting or self.waiting[0].yields or self.waiting[0].num_unread:
            return
        staying = [each for each in self.running if not each.yields]
        if not self._has_room(self.waiting[0], staying):  # it would not help
            return
        while self.running and self.running[-1].yields and not self._has_room(self.waiting[0], self.running):
            self._preempt(self.running[-1])

    def _admit(self) -> Request | None:
        """Moves the oldest waiting request to the running ones, if its blocks fit; else the oldest that takes none."""
        if not self.waiting or len(self.running) == self._max_num_seqs:
            return None
        request = self.waiting[0]
        if request.num_unread:  # preempted while its token is computed, which may be its last
            return None
        if not self._has_room(request, self.running):
            # What takes no blocks takes none from the oldest request, which is asked first each time.
            leased = (each for each in self.waiting if not each.holding.grows and not each.num_unread)
            if (found := next(leased, None)) is None:
                return None
            request = found
        self.waiting.remove(request)
        self._enter(request, Status.RUNNING)
        return request

    def _has_room(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether the oldest waiting request may run beside `running`: the running requests, or those of them that do
        not yield, once the others have lost their blocks."""
        if len(running) == self._max_num_seqs:
            return False
        self.memory.reuse(request)
        losing = () if running is self.running else tuple(each for each in self.running if each.yields)
        left = self.memory.left(running, (*self.waiting[1:], *self.awaiting_media, *losing))
        left -= sum(each.num_blocks for each in self.opening)
        growing = any(each.holding.grows for each in running)
        return not (growing and request.holding.grows and self.memory.missing(request, request.tokens) > left)

    def _enter(self, request: Request, status: Status) -> None:
        request.move_to(status)
        insort(self._queues[status], request, key=BY_ARRIVAL)

    def _prefill_before_media(self, others: Sequence[Chunk]) -> list[Chunk]:
        """Chunks before missing media, within tokens and free blocks that no other request needs now."""
        chunks: list[Chunk] = []
        budget = self._max_num_batched_tokens - sum(chunk.tokens for chunk in others)
        if not self.awaiting_media or not budget:
            return chunks
        memory = self.memory
        promised = sum(memory.missing(other, other.tokens) for other in (*self.running, *self.waiting))
        for request in self.awaiting_media:
            spare = max(0, memory.free - promised)
            start = request.holding.num_computed_tokens
            fitting = (len(request.holding.blocks) + spare) * memory.block_tokens
            # Whole blocks: what is left over costs no more together with the media, and a step by itself now.
            end = min(start + budget, fitting, request.early_tokens)
            end -= end % memory.block_tokens
            if request.holding.reclaimed or end <= start:
                continue
            if memory.lacks_states(len(chunks) + 1):
                break
            chunks.append(Chunk(request, start, end, samples=False))
            memory.grow(request, end)
            budget -= end - start
            if not budget:
                break
        return chunks

    # --- assigning blocks and states ---------------------------------------------------------------------------

    def _allocate(self, chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        """Yields the chunks that got their blocks. Oldest first, so a chunk never loses blocks to a later one."""
        for chunk in sorted(chunks, key=attrgetter("request.arrival")):
            request = chunk.request
            missing = self.memory.missing(request, chunk.end)
            if request.status is Status.RUNNING and not missing:
                yield chunk
                continue
            if chunk.draft_tokens and missing > self.memory.free:
                chunk = _chunk(request, chunk.known_end - chunk.start)  # no request is preempted for draft tokens
            if request.status is Status.RUNNING and self._free_blocks(request, chunk.end):
                self.memory.grow(request, chunk.end)
                yield chunk

    def _free_blocks(self, request: Request, tokens: int) -> bool:
        """Takes blocks from other requests until this one can have `tokens`.

        Returns False if it is itself the newest running request and was preempted.
        """
        while self.memory.missing(request, tokens) > self.memory.free:
            victim = self._reclaimable()
            if victim:
                self.memory.reclaim(victim)
                continue
            victim = next(each for each in reversed(self.running) if each.holding.grows)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _reclaimable(self) -> Request | None:
        """The newest request that can lose blocks without running; requests awaiting media before waiting ones."""
        for queue in (self.awaiting_media, self.waiting):
            for request in reversed(queue):
                if request.holding.losable:
                    return request
        return None

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self.running.remove(request)
        self.memory.reclaim(request)
        self._enter(request, Status.WAITING)

    def _assign_states(self, chunks: Sequence[Chunk]) -> None:
        """Gives each chunk the slot that it writes, taking slots from requests that do not run."""
        while self.memory.lacks_states(len(chunks)) and (victim := self._reclaimable()):
            self.memory.reclaim(victim)
        self.memory.write_states([(chunk.request, chunk.end) for chunk in chunks])

    def _places(self, chunk: Chunk) -> set[int]:
        """The places within a chunk where other requests may begin with its state."""
        return snapshot_places(chunk, self.memory.block_tokens) if self.memory.states else set()


def _chunk(request: Request, budget: int, draft_tokens: tuple[int, ...] = (), drafted: bool = False) -> Chunk:
    """As many of a request's next tokens as fit; if all do, draft tokens may follow."""
    start = request.holding.num_computed_tokens
    end = min(start + budget, request.tokens)
    return Chunk(request, start, end + len(draft_tokens), end == request.tokens, draft_tokens, drafted)
