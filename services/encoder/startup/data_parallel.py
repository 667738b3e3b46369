"""The ranks of `--data-parallel`, from their start to their end: processes beside this one, which is rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from common.ranks import Ranks, meeting_place
from services.encoder.settings import EncoderSettings
from services.encoder.startup.build import device_of, load_rank
from services.encoder.tower.parallel.exchange import Exchange, join, leave
from services.encoder.tower.parallel.rank_failure import Loss
from services.encoder.tower.parallel.tower import DataParallelTower

_RANK = "services.encoder.startup.rank"


@contextmanager
def data_parallel(settings: EncoderSettings) -> Iterator[DataParallelTower]:
    """The tower of as many ranks as the settings say, the first of them here, until all have left.

    A rank that cannot start ends this process. Raises StartupError if the first one cannot.
    """
    count, device, loss = settings.data_parallel, device_of(settings), Loss()
    meeting = meeting_place()
    facts = {"settings": settings.model_dump(mode="json"), "meeting": str(meeting)}
    with closing(Ranks(_RANK, count, facts, loss.note)) as others:
        own = load_rank(settings, device)  # while they load theirs
        for rank in range(1, count):
            others.hear(rank)
        # Last: however long loading takes, nobody waits in vain, and nothing of NCCL's gets into a graph.
        group = join(meeting, 0, count, device) if count > 1 else None
        try:
            yield DataParallelTower(own, others, count, Exchange(group), settings.batch_tokens, loss)
        finally:
            if loss.lost is not None:  # the rest may wait for what will never come
                others.kill()
    if group is not None and loss.lost is None:
        leave(device)
