"""A data-parallel tower encodes as one tower does, within the budget of each rank, and fails as a whole.

Ranks are threads here; `integration/test_ranks.py` runs processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, TypeAlias, cast
from unittest.mock import Mock

import pytest
import structlog
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gridsieve.common.adapter_folder import AdapterFolder
from gridsieve.common.contract.errors import StartupError, Unavailable
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import AFTER_TOWER, NONE, ItemPruning
from gridsieve.common.process import ExitStatus
from gridsieve.services.compute.device import device_of
from gridsieve.services.compute.rank_failure import RankFailure
from gridsieve.services.encoder.pruning.methods import keep_tokens
from gridsieve.services.encoder.settings import EncoderSettings
from gridsieve.services.encoder.startup import build, largest_forward
from gridsieve.services.encoder.startup.adapters import with_adapters
from gridsieve.services.encoder.startup.largest_forward import run_largest
from gridsieve.services.encoder.startup.rank import run_shares
from gridsieve.services.encoder.tower.adapted import AdaptedForward, Matrices
from gridsieve.services.encoder.tower.graph_buckets import PackingLimit, Size
from gridsieve.services.encoder.tower.graphs import with_graphs
from gridsieve.services.encoder.tower.parallel.exchange import Exchange
from gridsieve.services.encoder.tower.parallel.tower import DataParallelTower, packing_of
from gridsieve.services.encoder.tower.patches import Frames
from gridsieve.services.encoder.tower.tower import Tower
from tests.adapters import write_adapter
from tests.encoder.encoder_service import tower_of
from tests.encoder.test_graphs import assert_same
from tests.encoder.test_kept_frames import kept_frames
from tests.encoder.test_llava import frames_of
from tests.encoder.test_minicpmv import groups
from tests.families import load_reference

TIMEOUT_S = 20
PAIR = ((2, 3, 3), (2, 3, 3))


class Killed(BaseException):
    """Ends a thread rank as a signal ends a process."""


class RecordingTower:
    """A tower that records the shapes of each forward. instead: functions called before the next forwards."""

    def __init__(self, tower: Tower) -> None:
        self._tower = tower
        self.forwards: list[list[tuple[int, ...]]] = []
        self.instead: list[Callable[[], None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tower, name)

    def encode(self, slices: Sequence[Tensor], adapter: bytes = b"") -> list[Tensor]:
        self.forwards.append([tuple(frames.shape) for frames in slices])
        if self.instead:
            self.instead.pop()()
        return self._tower.encode(slices, adapter)


class ThreadRanks:
    """Takes the place of `common.ranks.Ranks`, with gloo groups. told: all messages, by rank. towers: of each rank."""

    def __init__(self, count: int, tower: Tower, rank_tokens: int, rank_failure: RankFailure) -> None:
        ranks = range(1, count)
        self.told: dict[int, list[bytes]] = {rank: [] for rank in ranks}
        self.towers = {rank: RecordingTower(tower) for rank in ranks}
        self.kill: Callable[[], None] = lambda: pytest.fail("only a test that expects it replaces this")
        self._count, self._rank_tokens, self._rank_failure = count, rank_tokens, rank_failure
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        self._orders, self._answers = ({rank: SimpleQueue[bytes | None]() for rank in ranks} for _ in range(2))
        self._threads = [threading.Thread(target=self._run, args=(rank,)) for rank in ranks]
        for each in self._threads:
            each.start()

    def group(self, rank: int) -> Any:
        return dist.ProcessGroupGloo(self._store, rank, self._count, timedelta(seconds=TIMEOUT_S))

    def send(self, rank: int, message: bytes) -> None:
        self.told[rank].append(message)
        self._orders[rank].put(message)

    def receive(self, rank: int, within_s: float) -> bytes:
        try:
            heard = self._answers[rank].get(timeout=within_s)
        except Empty:
            raise TimeoutError from None
        if heard is None:
            raise ConnectionResetError
        return heard

    def fail(self, rank: int) -> None:
        self._rank_failure.record(f"rank {rank} of {self._count} was ended by signal 9")

    def close(self) -> None:
        for orders in self._orders.values():
            orders.put(None)
        for each in self._threads:
            each.join(TIMEOUT_S)
            assert not each.is_alive()

    def _run(self, rank: int) -> None:
        orders: Any = SimpleNamespace(receive=self._orders[rank].get, answer=self._answers[rank].put)
        try:
            run_shares(orders, cast(Tower, self.towers[rank]), Exchange(self.group(rank)), self._rank_tokens)
        except Killed:
            self._answers[rank].put(None)
            self.fail(rank)


Made: TypeAlias = tuple[DataParallelTower, ThreadRanks]
MakeRanks: TypeAlias = Callable[..., Made]


@pytest.fixture(scope="module")
def make(tower: Tower) -> Iterator[MakeRanks]:
    """Makes a tower of so many ranks, which are closed at the end."""
    made: list[ThreadRanks] = []

    def make(count: int, own: Tower = tower, theirs: Tower | None = None, rank_tokens: int = 10_000) -> Made:
        rank_failure = RankFailure()
        rank_failure.watch(lambda: None)
        others = ThreadRanks(count, theirs or own, rank_tokens, rank_failure)
        made.append(others)
        recording, exchange = cast(Tower, RecordingTower(own)), Exchange(others.group(0))
        return DataParallelTower(recording, others, count, exchange, rank_tokens, rank_failure), others

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def four(make: MakeRanks) -> Made:
    return make(4)


def slices_of(tower: Tower, *sizes: tuple[int, int, int]) -> list[Tensor]:
    """Random slices. sizes: frames, rows and columns of tokens of each."""
    random, side_px = torch.Generator().manual_seed(len(sizes)), tower.patches.token_px
    shapes = [(frames, rows * side_px, columns * side_px, 3) for frames, rows, columns in sizes]
    return [torch.randint(0, 256, shape, dtype=torch.uint8, generator=random) for shape in shapes]


def forwards_of(towers: DataParallelTower, others: ThreadRanks) -> list[list[list[tuple[int, ...]]]]:
    """The shapes of all slices, by rank and forward."""
    return [each.forwards for each in (cast(Any, towers.own), *others.towers.values())]


# --- encoding ---------------------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=9))
def test_any_slices_are_encoded_as_by_one_tower_and_keep_their_order(
    tower: Tower, four: Made, sizes: list[tuple[int, int, int]]
) -> None:
    slices = slices_of(tower, *sizes)
    assert_same(four[0].encode(slices), [tower.encode([each])[0] for each in slices])


def of_windows(tower: Tower) -> list[Frames]:
    """A whole slice, and slices of which some tokens were chosen."""
    whole, side_px = slices_of(tower, *[(2, 5, 4)] * 6), tower.patches.token_px
    kept = ([0], [3, 7, 19], range(20), [18, 19], [4, 9])
    return [whole[0], *(kept_frames(each, tokens, side_px) for each, tokens in zip(whole[1:], kept, strict=True))]


def unrounded(tower: Tower) -> list[Frames]:
    return [each / 1.7 for each in slices_of(tower, (1, 2, 3), (2, 2, 3), (2, 1, 1), (1, 4, 2))]


# By family: whole frames, groups of frames with their times, pixels that are not rounded, and chosen tokens.
KINDS: Mapping[str, Callable[[Tower], Sequence[Frames]]] = {
    "internvl": lambda _: frames_of("internvl") * 2,
    "llava_pixtral": lambda _: frames_of("llava_pixtral") * 2,
    "minicpmv_4_5": lambda _: groups(),
    "nemotron_h_omni": unrounded,
    "qwen2_5_vl": of_windows,
}


@pytest.mark.parametrize("family", KINDS)
def test_slices_of_each_kind_are_shared_out(family: str, make: MakeRanks, checkpoints: Callable[[str], Path]) -> None:
    tower = tower_of(checkpoints(family))
    towers, others = make(2, tower)
    slices = KINDS[family](tower)
    assert_same(towers.encode(slices), [tower.encode([each])[0] for each in slices])
    assert all(forwards_of(towers, others))


def test_every_rank_encodes_its_share_with_the_adapter_of_the_forward(
    levels_checkpoint: Path, make: MakeRanks, tmp_path: Path
) -> None:
    write_adapter(load_reference("qwen3_vl", levels_checkpoint), tmp_path, target_modules="all-linear")
    tower = with_adapters(tower_of(levels_checkpoint), [AdapterFolder("mine", tmp_path)])
    towers, others = make(2, tower)
    slices, digest = slices_of(tower, *PAIR, (1, 4, 2)), tower.adapters["mine"]
    for adapter in (digest, b""):
        assert_same(towers.encode(slices, adapter), [tower.encode([each], adapter)[0] for each in slices])
    assert all(forwards_of(towers, others))


def test_slices_are_shared_by_cost_and_a_rank_without_a_share_is_told_nothing(tower: Tower, make: MakeRanks) -> None:
    towers, others = make(2)
    # The first costs more than two slices of half its tokens.
    slices = slices_of(tower, (2, 8, 8), (2, 2, 5), (2, 4, 8), (2, 8, 4))
    towers.encode(slices[:1])
    assert others.told[1] == []
    towers.encode(slices)
    first, *rest = [tuple(frames.shape) for frames in slices]
    assert forwards_of(towers, others) == [[[first], [first]], [rest]]


@pytest.mark.parametrize("largest", [Size(100, 2, 500, 100), None])
def test_each_rank_keeps_to_the_limit_of_one_forward(tower: Tower, make: MakeRanks, largest: Size | None) -> None:
    """Of two slices, or of their eight tokens."""
    packing = (
        PackingLimit(largest, lambda frames: Size(tower.patches.tokens(frames.shape), 1, 2, 4)) if largest else None
    )
    towers, others = make(3, replace(tower, packing=packing), rank_tokens=8)
    assert towers.packing.largest == (Size(300, 6, 1500, 300) if largest else Size(24, 24, 24, 24))
    towers.encode(slices_of(tower, *[(2, 2, 2)] * 9))
    assert [[len(forward) for forward in of_rank] for of_rank in forwards_of(towers, others)] == [[2, 1]] * 3


def test_embeddings_come_back_in_the_towers_dtype(levels_checkpoint: Path, make: MakeRanks) -> None:
    half = tower_of(levels_checkpoint, "bfloat16")
    towers, _ = make(2, half)
    slices = slices_of(half, *PAIR)
    for found, expected in zip(towers.encode(slices), (half.encode([each])[0] for each in slices), strict=True):
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("device", "gpus", "found"),
    [
        ("cuda:2", 5, ["cuda:2", "cuda:3", "cuda:4"]),
        ("auto", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("auto", 0, ["cpu"] * 3),
        ("cuda:1", 3, "needs as many CUDA devices, starting at cuda:1; this machine has 3"),
        ("abacus", 0, "--device abacus cannot be used: "),
    ],
)
def test_each_rank_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, found: list[str] | str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    # Of a device without an index, torch makes tensors on the current one.
    current = {torch.device("cuda"): torch.device("cuda:0")}
    monkeypatch.setattr(torch, "zeros", lambda _, device: SimpleNamespace(device=current.get(device, device)))
    if isinstance(found, str):
        with pytest.raises(StartupError, match=found):
            device_of(device, "--data-parallel", 3)
    else:
        assert [str(device_of(device, "--data-parallel", 3, rank)) for rank in range(3)] == found


def test_the_largest_forward_fills_every_rank_twice_and_with_each_adapter_and_is_pruned_by_every_method(
    tower: Tower, make: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods: list[str] = []

    def keep(embeds: Tensor, grid: Grid, pruning: ItemPruning) -> Tensor:
        methods.append(pruning.method)
        return keep_tokens(embeds, grid, pruning)

    monkeypatch.setattr(largest_forward, "keep_tokens", keep)
    adapted = replace(tower, adapted={b"mine": AdaptedForward(tower.forward, Mock(Matrices), b"mine")})
    towers, others = make(2, graphed := with_graphs(adapted, 100), rank_tokens=100)
    run_largest(towers, packing_of(graphed, 100).largest)
    side_px = 10 * tower.patches.token_px
    assert forwards_of(towers, others) == [[[(2, side_px, side_px, 3)]] * 3] * 2
    assert sorted(methods) == sorted(set(AFTER_TOWER) - {NONE})


def test_a_device_without_memory_for_the_largest_forward_is_warned_about(tower: Tower, make: MakeRanks) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("out of memory")

    towers, others = make(2, graphed := with_graphs(tower, 100), rank_tokens=100)
    others.towers[1].instead.append(fail)
    with structlog.testing.capture_logs() as logs:
        run_largest(towers, packing_of(graphed, 100).largest)
    assert [each["event"] for each in logs if each["log_level"] == "warning"] == [
        "the device lacks memory for a forward of --batch-tokens"
    ]


def test_on_cuda_the_largest_forward_is_run_before_the_service_serves(
    tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Size] = []
    monkeypatch.setattr(build, "device_of", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(build, "load_rank", lambda *_: tower)
    monkeypatch.setattr(build, "run_largest", lambda _, largest: ran.append(largest))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**31))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2**29)
    with structlog.testing.capture_logs() as logs, build.parallel_tower(EncoderSettings.load(["--batch-tokens", "50"])):
        assert ran == [Size(50, 50, 50, 50)]
    assert {"held_mib": 512, "free_mib": 1024}.items() <= logs[-1].items()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_its_capture_alone_encodes_its_share_without_graphs(
    tower: Tower, make: MakeRanks, failing: int
) -> None:
    """It keeps to the limit of tokens only, the other one to that of its graphs, of two slices."""
    graphed = replace(tower, packing=PackingLimit(Size(100, 2, 500, 100), lambda _: Size(4, 1, 2, 4)))
    ranks = [graphed, graphed]
    ranks[failing] = tower
    towers, others = make(2, *ranks)
    slices = slices_of(tower, *[(2, 2, 2)] * 6)
    assert_same(towers.encode(slices), [tower.encode([each])[0] for each in slices])
    forwards = [[len(forward) for forward in of_rank] for of_rank in forwards_of(towers, others)]
    assert (forwards[failing], forwards[1 - failing]) == ([3], [2, 1])


# --- failures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_a_forward_that_fails_on_one_rank_fails_and_the_next_one_succeeds(
    tower: Tower, make: MakeRanks, failing: int, error: type[Exception]
) -> None:
    """Out-of-memory stays OutOfMemoryError, so that the batcher runs the slices one at a time."""

    def fail() -> None:
        raise error("the tower fell")

    towers, others = make(2)
    rank: Any = others.towers[1] if failing else towers.own
    slices = slices_of(tower, *PAIR, (2, 2, 2))
    for _ in range(2):
        rank.instead.append(fail)
        with pytest.raises(RuntimeError, match=r"the tower fell$|rank 1: its device has no memory left$") as failed:
            towers.encode(slices)
        assert isinstance(failed.value, torch.OutOfMemoryError) == (error is torch.OutOfMemoryError)
        assert_same(towers.encode(slices), tower.encode(slices))
    assert towers.rank_failure.cause is None


def test_a_rank_that_ends_while_it_encodes_ends_the_tower_and_is_named(tower: Tower, make: MakeRanks) -> None:
    def end() -> None:
        raise Killed

    towers, others = make(3)
    others.towers[2].instead.append(end)
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"has ended: rank 2 of 3 was ended by signal 9$") as failed:
            towers.encode(slices_of(tower, *PAIR, (2, 3, 3)))
        assert failed.value.stage == "encoder"
    assert [len(told) for told in others.told.values()] == [1, 1]  # a failed tower asks no rank


def test_a_rank_that_does_not_answer_is_killed_and_never_asked_again(
    tower: Tower, make: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang() -> None:
        assert killed.wait(TIMEOUT_S)
        raise Killed

    def kill() -> None:
        killed.set()
        others.fail(1)

    (towers, others), killed = make(2), threading.Event()
    others.towers[1].instead.append(hang)
    others.kill = kill
    monkeypatch.setattr("gridsieve.services.encoder.tower.parallel.tower.TIMEOUT", timedelta(seconds=0.1))
    monkeypatch.setattr("gridsieve.services.compute.rank_failure._REPORTED_WITHIN_S", 0.05)
    for _ in range(2):
        with pytest.raises(Unavailable, match="has ended: rank 1 of 2 was ended by signal 9"):
            towers.encode(slices_of(tower, *PAIR))
    assert len(others.told[1]) == 1


def test_a_rank_that_ends_before_the_service_serves_ends_it_as_one_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        RankFailure().record("rank 1 of 2 ended with status 2")
    assert ended.value.code == ExitStatus.CANNOT_START


JOINING = """
import os, signal, sys, torch
from datetime import timedelta
from pathlib import Path
from gridsieve.services.compute.group import join
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
join(Path(sys.argv[1]), 0, 2, torch.device("cpu"), "--data-parallel", timedelta(minutes=5))
"""


def test_a_signal_ends_a_service_that_waits_for_its_ranks_to_join(tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    with subprocess.Popen([sys.executable, "-c", JOINING, str(meeting)]) as service:
        try:
            while not meeting.exists():
                assert service.poll() is None
                time.sleep(0.02)
            time.sleep(0.2)
            service.terminate()
            assert service.wait(20) == 7
        finally:
            service.kill()
