"""Rank 0's side of a model on several devices: starts the other ranks, tells them each step, hears of their end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import structlog
import torch
from torch import Tensor

from common.process import ExitStatus
from common.ranks import Ranks, meeting_place
from services.generation.parallel.group import Group
from services.generation.parallel.steps import to_bytes
from services.generation.request.batch import Packed

MODULE = "services.generation.startup.rank"

log = structlog.get_logger()


class Leading:
    """The other ranks, from their start to `close`. One that ends before `watch` ends this process as well."""

    def __init__(self, count: int, arguments: Sequence[str], device: torch.device, module: str = MODULE) -> None:
        """Returns once all have met. arguments: this service's own flags, which every rank reads for itself.

        Raises StartupError if they do not meet.
        """
        self.lost: str | None = None
        self._on_lost: Callable[[], None] | None = None
        meeting = meeting_place()
        facts = {"arguments": list(arguments), "meeting": str(meeting)}
        self.ranks = Ranks(module, count, facts, self._note)
        self.group = Group(0, count, meeting, device)
        log.info("ranks", count=count, others=self.ranks.pids)

    def watch(self, on_lost: Callable[[], None]) -> None:
        """From now on a rank that ends is told, in a thread of its own, to whoever can end this service in order."""
        self._on_lost = on_lost

    def tell(self, packed: Packed, features: Tensor | None) -> None:
        """What all ranks compute next. features: as of `Runner.compute`. Raises OSError if a rank has ended."""
        self.ranks.tell(to_bytes(packed))
        if features is not None:
            self.group.from_first(features)

    def close(self, in_step: bool = True) -> None:
        """in_step: whether ranks still compute the same; else some may wait for what never comes."""
        self.ranks.close()
        if in_step and self.lost is None:
            self.group.leave()

    def _note(self, lost: str) -> None:
        self.lost = lost
        if self._on_lost is None:  # this thread's others may wait for that rank for ever
            log.error("cannot start", error=lost)
            os._exit(ExitStatus.CANNOT_START)
        log.error("a rank is lost, and the service ends", error=lost)
        self._on_lost()
