"""A tower whose layers are divided among ranks computes what transformers' tower computes, and fails as a whole.

Ranks are threads here; `integration/test_ranks.py` runs processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError, Unavailable
from gridsieve.services.compute.rank_failure import RankFailure
from gridsieve.services.encoder.settings import EncoderSettings
from gridsieve.services.encoder.startup.build import load_rank, parallel_tower, share_of
from gridsieve.services.encoder.startup.rank import run_forwards
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.parallel.division import Share
from gridsieve.services.encoder.tower.parallel.exchange import Exchange
from gridsieve.services.encoder.tower.parallel.tensor import TensorParallelTower
from gridsieve.services.encoder.tower.tower import ModelForward
from tests.encoder.test_tower import frames_of, reference_embeds
from tests.families import FAMILIES, load_reference, vision_of

CPU = torch.device("cpu")
TIMEOUT_S = 20


@contextmanager
def divided(checkpoint: Path, ranks: int) -> Iterator[TensorParallelTower]:
    """The tower of so many ranks, all but the first of which are threads."""
    torch.set_num_threads(1)
    store, shares = dist.HashStore(), [Share(rank, ranks) for rank in range(ranks)]  # type: ignore[attr-defined]
    towers = [load_tower(Checkpoint(checkpoint), "auto", CPU, share=share) for share in shares]
    orders = {rank: SimpleQueue[bytes | None]() for rank in range(1, ranks)}

    def join(rank: int) -> Exchange:
        shares[rank].group = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=TIMEOUT_S))
        return Exchange(shares[rank].group)

    def run(rank: int) -> None:
        own: Any = SimpleNamespace(receive=orders[rank].get)
        run_forwards(own, towers[rank], join(rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in orders]
    for each in threads:
        each.start()
    others: Any = SimpleNamespace(send=lambda rank, order: orders[rank].put(order))
    try:
        yield TensorParallelTower(towers[0], others, ranks, join(0), 10_000, RankFailure())
    finally:
        for each in orders.values():
            each.put(None)
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    "family",
    [
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"),
        *(pytest.param(name, marks=pytest.mark.deep) for name in ("glm4v", "qwen3_omni_moe")),
    ],
)
def test_all_levels_equal_transformers_tower(checkpoints: Callable[[str], Path], family: str) -> None:
    folder, shape = checkpoints(family), FAMILIES[family]
    slices = [frames_of(1, rows, columns, shape, seed) for seed, (rows, columns) in enumerate([(1, 6), (5, 3), (5, 3)])]
    reference = vision_of(load_reference(family, folder))
    with divided(folder, 2) as tower:
        layers: Any = cast(ModelForward, tower.own.forward).layers
        assert 2 * layers[0].attn.num_heads == reference.blocks[0].attn.num_heads
        for found, frames in zip(tower.encode(slices), slices, strict=True):
            expected = reference_embeds(reference, folder, frames, shape)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_forward_that_fails_on_rank_0_ends_the_ranks_that_wait_in_its_sums(
    levels_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gridsieve.services.compute.rank_failure._REPORTED_WITHIN_S", 0.05)
    failure = RankFailure()
    failure.watch(lambda: None)
    share = Share(0, 2)
    own = load_tower(Checkpoint(levels_checkpoint), "auto", CPU, share=share)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    share.group = SimpleNamespace(allreduce=fail)
    others: Any = SimpleNamespace(
        send=lambda *_: None, kill=lambda: failure.record("rank 1 of 2 was ended by signal 9")
    )
    exchange: Any = SimpleNamespace(send=lambda *_: None)
    tower = TensorParallelTower(own, others, 2, exchange, 10_000, failure)
    with pytest.raises(Unavailable, match="has ended: rank 1 of 2"):
        tower.encode([frames_of(1, 2, 2, FAMILIES["qwen3_vl"])])


@pytest.mark.parametrize(
    ("family", "flags", "message"),
    [
        ("qwen3_vl", ["--tower-tensor-parallel=3"], "--tower-tensor-parallel 3 must divide the 2 attention heads"),
        (
            "qwen3_vl",
            ["--tower-tensor-parallel=2", "--dtype=float16"],
            "--dtype float16 with --tower-tensor-parallel 2",
        ),
        ("llava", ["--tower-tensor-parallel=2"], "--tower-tensor-parallel 2: the towers of llava are not divided"),
    ],
)
def test_what_cannot_be_divided_is_refused_at_the_start(
    checkpoints: Callable[[str], Path], family: str, flags: list[str], message: str
) -> None:
    settings = EncoderSettings.load(["--model", str(checkpoints(family)), *flags])
    with pytest.raises(StartupError, match=message):
        load_rank(settings, CPU, share_of(settings, 0))


def test_towers_are_not_both_shared_and_divided() -> None:
    settings = EncoderSettings.load(["--data-parallel", "4", "--tower-tensor-parallel", "2"])
    with pytest.raises(StartupError, match="--data-parallel 4 and --tower-tensor-parallel 2"), parallel_tower(settings):
        pass
