"""Who computes what in the next step, and who gives up cache blocks when they run out.

One step's budget of tokens goes first to running requests that decode, then to prompts being prefilled, then to newly
admitted ones, first come first served; what is left goes to the text before media that have not arrived.

    who holds blocks              how it loses them
    running                       newest first, and only to an older one: it waits and is computed again
    waiting (media arrived)       before any running one
    awaiting media                first of all, and it is not prefilled again until its media is there

A prompt is admitted only where it fits beside what the running ones still have to prefill, so that only answers
growing can preempt. It knows neither the model nor torch.
Source: continuous batching, Orca (OSDI 2022); chunked prefill, Sarathi-Serve, arXiv 2403.02310.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from operator import attrgetter

from services.generation.blocks import BlockAllocator
from services.generation.request import Request, Status
from services.generation.windows import Window

BY_ARRIVAL = attrgetter("arrival")


class Scheduler:
    """Owns the order of requests and their blocks. Lists are sorted by arrival, oldest first.

    budget_tokens: at most this many tokens a step.
    max_running: at most this many requests decode or prefill at a time, those awaiting media not counted.
    """

    def __init__(self, allocator: BlockAllocator, budget_tokens: int, max_running: int) -> None:
        self.allocator = allocator
        self._budget_tokens = budget_tokens
        self._max_running = max_running
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.awaiting_media: list[Request] = []
        self.preemptions = 0
        self._lists = {
            Status.RUNNING: self.running,
            Status.WAITING: self.waiting,
            Status.AWAITING_MEDIA: self.awaiting_media,
        }

    def add(self, request: Request) -> None:
        """Takes a new request, whose `max_tokens` must fit into the whole cache."""
        assert self.allocator.blocks_for(request.max_tokens) <= self.allocator.total, f"{request} can never fit"
        insort(self._lists[request.status], request, key=BY_ARRIVAL)

    def media_complete(self, request: Request) -> None:
        """Puts a request whose last media item has arrived where its arrival places it."""
        self.awaiting_media.remove(request)
        request.move_to(Status.WAITING)
        insort(self.waiting, request, key=BY_ARRIVAL)

    def remove(self, request: Request) -> None:
        """Forgets a request, finished or not, and frees its blocks."""
        self._lists[request.status].remove(request)
        self._release(request)
        request.move_to(Status.DONE)

    def requests(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting
        yield from self.awaiting_media

    def check_integrity(self) -> None:
        """Asserts that blocks are free or have one owner, and that no request holds more than it needs."""
        self.allocator.check_integrity(request.blocks for request in self.requests())
        for request in self.requests():
            assert len(request.blocks) >= self.allocator.blocks_for(request.computed), f"{request} lacks blocks"
            assert len(request.blocks) <= self.allocator.blocks_for(request.tokens), f"{request} hoards blocks"

    def schedule(self) -> list[Window]:
        """The windows of the next step, with blocks for each; empty if nothing can run until something arrives."""
        windows = list(self._with_blocks(self._windows_in_budget()))
        # The oldest running request is always among them: it was admitted with budget left over, which no newer
        # prompt gets before it; and whoever is oldest gets its blocks.
        assert windows or not (self.running or self.waiting), "requests could run, and none does"
        return windows + self._early_windows(self._budget_tokens - sum(window.tokens for window in windows))

    # --- who gets tokens ---------------------------------------------------------------------------------------

    def _windows_in_budget(self) -> list[Window]:
        budget = self._budget_tokens
        windows: list[Window] = []
        decoding = [request for request in self.running if request.tokens - request.computed == 1]
        prefilling = [request for request in self.running if request.tokens - request.computed > 1]
        for request in decoding + prefilling:
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
        promised = sum(self._missing_blocks(other, other.tokens) for other in self.running)
        held_by_idle = sum(len(other.blocks) for other in (*self.waiting[1:], *self.awaiting_media))
        # One block for each to grow into, or the next token of any of them throws the newcomer out again.
        room = self.allocator.free + held_by_idle - promised - len(self.running)
        if self.running and self._missing_blocks(request, request.tokens) > room:
            return None
        del self.waiting[0]
        request.move_to(Status.RUNNING)
        insort(self.running, request, key=BY_ARRIVAL)
        return request

    # --- who gets blocks ---------------------------------------------------------------------------------------

    def _with_blocks(self, windows: Sequence[Window]) -> Iterator[Window]:
        """Those of `windows` that got their blocks. The oldest take first, so a window that has taken keeps."""
        for window in sorted(windows, key=lambda window: window.request.arrival):
            request = window.request
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
                if other.blocks:
                    return other
        return None

    def _reclaim(self, request: Request) -> None:
        request.reclaimed = True
        self._release(request)

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self.running.remove(request)
        self._release(request)
        request.move_to(Status.WAITING)
        insort(self.waiting, request, key=BY_ARRIVAL)

    def _release(self, request: Request) -> None:
        self.allocator.release(request.blocks)
        request.blocks = []
        request.computed = 0

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
    end = min(request.computed + budget, request.tokens)
    return Window(request, request.computed, end, samples=end == request.tokens)
