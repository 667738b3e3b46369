"""The shares of one tower as one: every rank gets all slices of a forward, and rank 0 has the embeddings.

    rank 0   send order, frames ─▶ encode ─▶ embeddings
                                     ↕        sums, two a layer
    rank r   receive order, frames ─▶ encode

A forward that fails on one rank leaves the others in a sum, so the tower has failed for good.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gridsieve.services.compute.rank_failure import RankFailure
from gridsieve.services.encoder.tower.parallel.exchange import Exchange, announced, packed, unpacked
from gridsieve.services.encoder.tower.parallel.tower import Others, OutOfStep, ParallelTower
from gridsieve.services.encoder.tower.patches import Frames
from gridsieve.services.encoder.tower.tower import Tower


class TensorParallelTower(ParallelTower):
    """own: rank 0's share of the tower. others: ranks 1 to ranks − 1, with theirs."""

    def __init__(
        self, own: Tower, others: Others, ranks: int, exchange: Exchange, max_tokens: int, rank_failure: RankFailure
    ) -> None:
        super().__init__(own, others, 1, exchange, max_tokens, rank_failure)
        self._ranks = range(1, ranks)

    def _encode(self, slices: Sequence[Frames], adapter: bytes) -> list[Tensor]:
        # An error up to here leaves the ranks in step.
        order, frames = announced(slices, adapter), packed(slices, self.own.device)
        try:
            for rank in self._ranks:
                self._others.send(rank, order)
            sent = [self._exchange.send(frames, rank) for rank in self._ranks]
            embeds = self.own.encode(unpacked(frames, order), adapter)
            for work in sent:
                work.wait()
        except torch.AcceleratorError:
            raise
        except Exception as error:
            raise OutOfStep from error
        return embeds
