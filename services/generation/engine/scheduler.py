"""Who computes what in the next step, and who gives up cache blocks when they run out.

One step's budget of tokens goes first to running requests that decode, one each and then their guesses, then to prompts
being prefilled, then to newly admitted ones, first come first served; what is left goes to the text before media that
have not arrived.

    who holds blocks              how it loses them
    running                       newest first, and only to an older one: it waits and is computed again
    waiting (media arrived)       before any running one
    awaiting media                first of all, and it is not prefilled again until its media is there

What earlier requests left in the cache is taken over where a request begins with the same (`prefixes`). Blocks of media
rows that the request itself never received are pinned until it ends, for it could not compute them again. They are
pinned only while the largest request fits beside all that are, so the oldest can always go on; one that comes later and
is larger waits until they end.

A prompt is admitted only where it fits beside what the running ones still have to prefill, so that only answers
growing can preempt. It knows neither the model nor torch.
Source: continuous batching, Orca (OSDI 2022); chunked prefill, Sarathi-Serve, arXiv 2403.02310.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter

from services.generation.engine.speculation import guess
from services.generation.kv_cache.blocks import BlockAllocator
from services.generation.kv_cache.prefixes import Prefixes
from services.generation.request.batch import Window
from services.generation.request.encoded_media import Answer
from services.generation.request.request import Request, Status

BY_ARRIVAL = attrgetter("arrival")


class Scheduler:
    """Owns the order of requests and their blocks. Lists are sorted by arrival, oldest first.

    budget_tokens: at most this many tokens a step.
    max_running: at most this many requests decode or prefill at a time, those awaiting media not counted.
    guess_tokens: at most this many tokens are guessed for each request that decodes.
    """

    def __init__(self, allocator: BlockAllocator, budget_tokens: int, max_running: int, guess_tokens: int = 0) -> None:
        self.allocator = allocator
        self._prefixes = Prefixes(allocator)
        self._pins: Counter[int] = Counter()  # how many requests have pinned a block
        self._budget_tokens = budget_tokens
        self._max_running = max_running
        self._guess_tokens = guess_tokens
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.awaiting_media: list[Request] = []
        self.following: list[Request] = []
        self.preemptions = 0
        self._lists = {
            Status.RUNNING: self.running,
            Status.WAITING: self.waiting,
            Status.AWAITING_MEDIA: self.awaiting_media,
            Status.FOLLOWING: self.following,
        }

    def add(self, request: Request, answers: Sequence[Answer]) -> None:
        """Takes a new request, whose `max_tokens` must fit into the whole cache, and which media it need not wait for.

        answers: what is known of its first media items.
        """
        assert self.allocator.blocks_for(request.max_tokens) <= self.allocator.total, f"{request} can never fit"
        items, blocks = self._prefixes.recall(request, answers) if answers else (0, [])
        if items and self._can_pin(request, blocks):
            for index, answer in enumerate(answers[:items]):
                request.take(index, answer, answer.last_rows)
            self._pin(request, blocks)
        self._prefixes.reuse(request)
        self._enter(request, Status.WAITING if request.rope.complete else Status.AWAITING_MEDIA)
        for follower in request.followers:
            self._enter(follower, Status.FOLLOWING)

    def start_followers(self, request: Request) -> None:
        """Has those that share a request's prompt begin, now that it is computed. It still holds its blocks."""
        for follower in (each for each in request.followers if each.status is Status.FOLLOWING):
            follower.share_prompt(request)
            self._pin(follower, request.blocks[: request.pinned])
            self.following.remove(follower)
            self._enter(follower, Status.WAITING)
        request.followers = []

    def media_complete(self, request: Request) -> None:
        """Puts a request whose last media item has arrived where its arrival places it."""
        self.awaiting_media.remove(request)
        self._enter(request, Status.WAITING)

    def computed(self, request: Request, tokens: int) -> None:
        """Notes how many of a request's tokens are computed now."""
        request.computed = tokens
        self._prefixes.remember(request)

    def remove(self, request: Request) -> None:
        """Forgets a request, finished or not, and frees its blocks."""
        self._lists[request.status].remove(request)
        self._pins -= Counter(request.blocks[: request.pinned])
        request.pinned = 0
        self._release(request)
        request.move_to(Status.DONE)

    def requests(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting
        yield from self.awaiting_media
        yield from self.following

    def check_integrity(self) -> None:
        """Asserts that every block is free or held as often as it counts, and no request holds more than it needs."""
        self.allocator.check_integrity(request.blocks for request in self.requests())
        for request in self.requests():
            assert len(request.blocks) >= self.allocator.blocks_for(request.computed), f"{request} lacks blocks"
            most = self.allocator.blocks_for(request.tokens + self._guess_tokens)
            assert len(request.blocks) <= most, f"{request} hoards blocks"
            assert request.pinned <= request.chained <= len(request.blocks), f"{request} pins what is not remembered"
        pinned = Counter(block for request in self.requests() for block in request.blocks[: request.pinned])
        assert pinned == self._pins, "pins were lost"

    def schedule(self) -> list[Window]:
        """The windows of the next step, with blocks for each; empty if nothing can run until something arrives."""
        windows = list(self._with_blocks(self._windows_in_budget()))
        if not windows and self.waiting:
            # The newest gave way, but an older one, which waited, can have what it held.
            windows = list(self._with_blocks(self._windows_in_budget()))
        # The oldest of those that can run is among them: it is admitted first, gets budget that no newer prompt gets
        # before it, and blocks from everybody else, but for those that one who awaits media has pinned.
        pinned = any(request.pinned for request in self.awaiting_media)
        assert windows or pinned or not (self.running or self.waiting), "requests could run, and none does"
        return windows + self._early_windows(self._budget_tokens - sum(window.tokens for window in windows))

    # --- who gets tokens ---------------------------------------------------------------------------------------

    def _windows_in_budget(self) -> list[Window]:
        budget = self._budget_tokens
        windows: list[Window] = []
        decoding = [request for request in self.running if request.tokens - request.computed == 1]
        prefilling = [request for request in self.running if request.tokens - request.computed > 1]
        # Half of what is left after one token each: guesses must not keep prompts from being computed.
        spare = (budget - len(decoding)) // 2
        for request in decoding[:budget]:
            most = min(self._guess_tokens, spare, request.max_tokens - request.tokens)
            request.guesses = guess(request, most) if most > 0 else ()
            windows.append(_window(request, 1 + len(request.guesses)))
            budget -= windows[-1].tokens
            spare -= len(request.guesses)
        for request in prefilling:
            if not budget:
                return windows
            windows.append(_window(request, budget))
            budget -= windows[-1].tokens
        while budget and (admitted := self._admit()):
            windows.append(_window(admitted, budget))
            budget -= windows[-1].tokens
        return windows

    def _admit(self) -> Request | None:
        """Moves the oldest waiting request to the running ones, if there is room."""
        if not self.waiting or len(self.running) == self._max_running:
            return None
        request = self.waiting[0]
        self._prefixes.reuse(request)
        promised = sum(self._missing_blocks(other, other.tokens) for other in self.running)
        idle = (*self.waiting[1:], *self.awaiting_media)
        reclaimable = sum(self.allocator.held_alone(other.blocks[other.pinned :]) for other in idle)
        # One block for each to grow into, or the next token of any of them throws the newcomer out again.
        room = self.allocator.free + reclaimable - promised - len(self.running)
        if self.running and self._missing_blocks(request, request.tokens) > room:
            return None
        del self.waiting[0]
        self._enter(request, Status.RUNNING)
        return request

    def _enter(self, request: Request, status: Status) -> None:
        request.guesses = ()
        request.move_to(status)
        insort(self._lists[status], request, key=BY_ARRIVAL)

    # --- who gets blocks ---------------------------------------------------------------------------------------

    def _with_blocks(self, windows: Sequence[Window]) -> Iterator[Window]:
        """Those of `windows` that got their blocks. The oldest take first, so a window that has taken keeps."""
        for window in sorted(windows, key=lambda window: window.request.arrival):
            request = window.request
            if window.guesses and self._missing_blocks(request, window.end) > self.allocator.free:
                # Nobody gives up a block for a guess.
                request.guesses = ()
                window = _window(request, 1)
            if request.status is Status.RUNNING and self._make_room(request, window.end):
                request.blocks += self.allocator.allocate(self._missing_blocks(request, window.end))
                yield window

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Takes blocks from others until `request` can hold `tokens`. False: only older ones hold any, it must wait."""
        while self._missing_blocks(request, tokens) > self.allocator.free:
            victim = self._idle_holder()
            if victim:
                self._reclaim(victim)
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _idle_holder(self) -> Request | None:
        """The newest request that holds blocks without running: one awaiting media before one that waits."""
        for others in (self.awaiting_media, self.waiting):
            for other in reversed(others):
                if len(other.blocks) > other.pinned:
                    return other
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
        """Lets go of all blocks but those that are pinned."""
        kept = request.pinned
        self.allocator.release(request.blocks[kept:])
        del request.blocks[kept:]
        request.computed = kept * self.allocator.block_tokens
        request.chained, request.chain = kept, self.allocator.serial_of(request.blocks[-1]) if kept else request.root

    def _can_pin(self, request: Request, blocks: Sequence[int]) -> bool:
        pinned = len(self._pins.keys() | set(blocks))
        return all(
            pinned + self.allocator.blocks_for(other.max_tokens) <= self.allocator.total
            for other in (request, *self.requests())
        )

    def _pin(self, request: Request, blocks: Sequence[int]) -> None:
        """Gives a request that holds nothing yet the first blocks of its prompt."""
        for block in blocks:
            self.allocator.hold(block)
        request.blocks, request.pinned = list(blocks), len(blocks)
        request.cached_tokens = len(blocks) * self.allocator.block_tokens
        self._pins.update(blocks)
        self._release(request)

    def _missing_blocks(self, request: Request, tokens: int) -> int:
        return max(0, self.allocator.blocks_for(tokens) - len(request.blocks))

    # --- text before media that have not arrived ---------------------------------------------------------------

    def _early_windows(self, budget: int) -> list[Window]:
        """Windows of requests that await media, from tokens and blocks that nobody else wants now."""
        windows: list[Window] = []
        if not budget or not self.awaiting_media:
            return windows
        promised = sum(self._missing_blocks(other, other.tokens) for other in (*self.running, *self.waiting))
        for request in self.awaiting_media:
            spare = max(0, self.allocator.free - promised)
            room = (len(request.blocks) + spare) * self.allocator.block_tokens - request.computed
            tokens = min(budget, room, request.ready_tokens - request.computed)
            if request.reclaimed or tokens < 1:
                continue
            windows.append(Window(request, request.computed, request.computed + tokens, samples=False))
            request.blocks += self.allocator.allocate(self._missing_blocks(request, request.computed + tokens))
            budget -= tokens
            if not budget:
                break
        return windows


def _window(request: Request, budget: int) -> Window:
    end = min(request.computed + budget, request.tokens + len(request.guesses))
    guesses = max(0, end - request.tokens)
    return Window(request, request.computed, end, samples=end >= request.tokens, guesses=guesses)
