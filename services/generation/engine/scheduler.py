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

A prompt is admitted only if it fits beside what running requests still have to prefill, so only growing answers cause
preemption. The scheduler knows neither the model nor torch.
Sources: continuous batching, Orca (OSDI 2022); chunked prefill, Sarathi-Serve, arXiv 2403.02310.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter

from framesieve.services.generation.engine.speculation import propose_draft_tokens
from framesieve.services.generation.kv_cache.blocks import BlockAllocator
from framesieve.services.generation.kv_cache.prefixes import PrefixCache
from framesieve.services.generation.request.batch import Chunk
from framesieve.services.generation.request.encoded_media import EncodedMedia
from framesieve.services.generation.request.request import BlockTable, Request, Status

BY_ARRIVAL = attrgetter("arrival")


class Scheduler:
    """Owns the queues of requests and their blocks. Each queue is sorted by arrival, oldest first.

    max_num_batched_tokens: tokens of one step. max_num_seqs: running requests. max_draft_tokens: per request and step.
    """

    def __init__(
        self, allocator: BlockAllocator, max_num_batched_tokens: int, max_num_seqs: int, max_draft_tokens: int = 0
    ) -> None:
        self.allocator = allocator
        self._prefix_cache = PrefixCache(allocator)
        self._pins: Counter[int] = Counter()  # how many requests have pinned each block
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._max_draft_tokens = max_draft_tokens
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.awaiting_media: list[Request] = []
        self.awaiting_sibling: list[Request] = []
        self.preemptions = 0
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
        assert self.allocator.blocks_for(request.max_tokens) <= self.allocator.total, f"{request} can never fit"
        items, blocks = self._prefix_cache.lookup_media(request, encoded_media) if encoded_media else (0, [])
        if items and self._can_pin(request, blocks):
            for index, encoded in enumerate(encoded_media[:items]):
                request.reuse_media(index, encoded)
            self._pin(request, blocks)
        self._prefix_cache.reuse(request)
        self._enter(request, Status.WAITING if request.prompt.complete else Status.AWAITING_MEDIA)
        for sibling in request.siblings:
            self._enter(sibling, Status.AWAITING_SIBLING)

    def start_siblings(self, request: Request) -> None:
        """Queues the siblings of a request that has prefilled their prompt and still has its blocks."""
        for sibling in (each for each in request.siblings if each.status is Status.AWAITING_SIBLING):
            self._pin(sibling, request.blocks[: request.num_pinned_blocks])
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

    def mark_computed(self, request: Request, num_computed_tokens: int) -> None:
        """Records that keys and values of the request's first tokens are in the cache."""
        request.num_computed_tokens = num_computed_tokens
        self._prefix_cache.cache_full_blocks(request)

    def remove(self, request: Request) -> None:
        """Removes a request, finished or not, and frees its blocks."""
        self._queues[request.status].remove(request)
        self._pins -= Counter(request.blocks[: request.num_pinned_blocks])
        request.num_pinned_blocks = 0
        self._release(request)
        request.move_to(Status.DONE)

    def requests(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting
        yield from self.awaiting_media
        yield from self.awaiting_sibling

    def check_integrity(self) -> None:
        """Asserts that no block is lost or miscounted, and that each request has the blocks it needs and no more."""
        self.allocator.check_integrity(request.blocks for request in self.requests())
        for request in self.requests():
            needed = self.allocator.blocks_for(request.num_computed_tokens)
            assert len(request.blocks) >= needed, f"{request} lacks blocks"
            most = self.allocator.blocks_for(request.tokens + self._max_draft_tokens)
            assert len(request.blocks) <= most, f"{request} has more blocks than tokens"
            cached = request.num_cached_blocks
            assert request.num_pinned_blocks <= cached <= len(request.blocks), f"{request} pins blocks out of the cache"
        pinned = Counter(block for request in self.requests() for block in request.blocks[: request.num_pinned_blocks])
        assert pinned == self._pins, "pins differ from the pinned blocks of requests"

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
        return chunks + self._prefill_before_media(chunks)

    # --- assigning tokens --------------------------------------------------------------------------------------

    def _assign_tokens(self) -> list[Chunk]:
        budget = self._max_num_batched_tokens
        chunks: list[Chunk] = []
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running:
            tokens = request.tokens
            if tokens <= request.max_tokens:  # else its last token is sampled and not yet read
                (decodes if tokens - request.num_computed_tokens == 1 else prefills).append(request)
        # Draft tokens get half of what decodes leave, so that they cannot keep prompts from being prefilled.
        draft_budget = (budget - len(decodes)) // 2
        for request in decodes[:budget]:
            draft_tokens: tuple[int, ...] = ()
            if self._max_draft_tokens:
                limit = min(self._max_draft_tokens, draft_budget, request.max_tokens - request.tokens)
                draft_tokens = propose_draft_tokens(request, limit) if limit > 0 else ()
            chunks.append(_decode_chunk(request, draft_tokens))
            budget -= 1 + len(draft_tokens)
            draft_budget -= len(draft_tokens)
        for request in prefills:
            if not budget:
                return chunks
            chunks.append(_prefill_chunk(request, budget))
            budget -= chunks[-1].tokens
        while budget and (admitted := self._admit()):
            chunks.append(_prefill_chunk(admitted, budget))
            budget -= chunks[-1].tokens
        return chunks

    def _admit(self) -> Request | None:
        """Moves the oldest waiting request to the running ones, if its blocks fit."""
        if not self.waiting or len(self.running) == self._max_num_seqs:
            return None
        request = self.waiting[0]
        if request.num_unread:  # preempted while its token is computed, which may be its last
            return None
        self._prefix_cache.reuse(request)
        promised = sum(self._missing_blocks(other, other.tokens) for other in self.running)
        not_running = (*self.waiting[1:], *self.awaiting_media)
        reclaimable = sum(self.allocator.exclusive(other.blocks[other.num_pinned_blocks :]) for other in not_running)
        # One block for each running request to grow into: otherwise its next token would preempt the new request.
        available = self.allocator.free + reclaimable - promised - len(self.running)
        if self.running and self._missing_blocks(request, request.tokens) > available:
            return None
        del self.waiting[0]
        self._enter(request, Status.RUNNING)
        return request

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
            end = self._whole_blocks(min(start + budget, fitting, request.ready_tokens))
            if request.reclaimed or end <= start:
                continue
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
                chunk = _decode_chunk(request, ())  # no request is preempted for draft tokens
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
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _reclaimable(self) -> Request | None:
        """The newest request that has blocks without running; requests awaiting media before waiting ones."""
        for queue in (self.awaiting_media, self.waiting):
            for request in reversed(queue):
                if len(request.blocks) > request.num_pinned_blocks:
                    return request
        return None

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

    def _can_pin(self, request: Request, blocks: Sequence[int]) -> bool:
        """Whether every request still fits into the cache beside all pinned blocks."""
        pinned = len(self._pins.keys() | set(blocks))
        return all(
            pinned + self.allocator.blocks_for(other.max_tokens) <= self.allocator.total
            for other in (request, *self.requests())
        )

    def _pin(self, request: Request, blocks: Sequence[int]) -> None:
        """Gives a request without blocks the first blocks of its prompt, and pins them."""
        self.allocator.incref(blocks)
        request.blocks, request.num_pinned_blocks = BlockTable(blocks), len(blocks)
        request.cached_tokens = len(blocks) * self.allocator.block_tokens
        self._pins.update(blocks)
        self._release(request)  # sets its counters to the pinned blocks

    def _whole_blocks(self, tokens: int) -> int:
        return tokens - tokens % self.allocator.block_tokens

    def _missing_blocks(self, request: Request, tokens: int) -> int:
        return max(0, self.allocator.blocks_for(tokens) - len(request.blocks))


def _decode_chunk(request: Request, draft_tokens: tuple[int, ...]) -> Chunk:
    start = request.num_computed_tokens
    return Chunk(request, start, start + 1 + len(draft_tokens), samples=True, draft_tokens=draft_tokens)


def _prefill_chunk(request: Request, budget: int) -> Chunk:
    start = request.num_computed_tokens
    end = min(start + budget, request.tokens)
    return Chunk(request, start, end, samples=end == request.tokens)
