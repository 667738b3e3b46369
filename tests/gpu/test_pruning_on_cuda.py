"""Pruning on CUDA keeps the same tokens as on the CPU, without synchronising, and copies delay no forward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.services.compute.transfers import Readback
from gridsieve.services.encoder.items.item import in_shared_memory
from gridsieve.services.encoder.pruning.methods import Scores, keep_tokens
from gridsieve.services.encoder.tower.loading import load_tower
from tests.families import FAMILIES
from tests.gpu.waits import waits_forbidden

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

CUDA = torch.device("cuda")
METHODS = ("evs", "evs_causal", "vidcom2", "vcast", "random")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rate", [0.1, 0.75])
def test_pruning_keeps_the_same_tokens_as_on_the_cpu_without_synchronising(method: str, rate: float) -> None:
    grid, pruning = Grid(9, 6, 7), ItemPruning(rate, method, seed=3)
    embeds = torch.randn(grid.tokens, 64, generator=torch.Generator().manual_seed(2)).to(CUDA)
    known = dict[str, Scores]()
    torch.cuda.synchronize()
    with waits_forbidden():
        kept = keep_tokens(embeds, grid, pruning, known)
    scores = {name: tuple(each.cpu() for each in found) for name, found in known.items()}
    assert kept.device.type == "cuda"
    assert torch.equal(kept.cpu(), keep_tokens(embeds.cpu(), grid, pruning, scores))


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        ("evs", [*range(12)]),
        ("evs_causal", [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 14, 18, 19, 20]),
        ("vidcom2", [0, 1, 2, 6, 7, 8, 12, 13, 14, 18, 19, 20]),
        ("vcast", [0, 1, 2, 6, 7, 8, 12, 13, 14, 18, 19, 20]),
    ],
)
def test_ties_go_to_the_earlier_token(method: str, kept: list[int]) -> None:
    assert keep_tokens(torch.ones(24, 8, device=CUDA), Grid(4, 2, 3), ItemPruning(0.5, method)).tolist() == kept


def test_only_the_read_of_kept_rows_waits_for_the_device(family: str, family_checkpoint: Path) -> None:
    tower, shape = load_tower(Checkpoint(family_checkpoint), "bfloat16", CUDA), FAMILIES[family]
    if not tower.forward.varlen:  # type: ignore[attr-defined]
        pytest.skip("this torch has no attention for this card that reads the ends of sequences on the device")
    rows, columns = shape.sized(4, 5)
    sides_px = (rows * shape.token_px, columns * shape.token_px)
    frames = torch.randint(0, 256, (shape.temporal_patch, *sides_px, 3), dtype=torch.uint8)
    sides = tower.patches.grid(*sides_px)
    assert sides is not None
    slices, grid = [frames.roll(each, 1) for each in range(6)], Grid(6, *sides)

    def begin(method: str) -> Readback:
        embeds = torch.cat(tower.encode(slices), dim=1)
        kept = keep_tokens(embeds[0], grid, ItemPruning(0.75, method))
        return Readback(embeds[:, kept.long()], kept)

    count = grid.slice_tokens
    for method in METHODS:
        with torch.inference_mode():
            expected = begin(method).wait()
            torch.cuda.synchronize()
            with waits_forbidden():
                found, kept = begin(method).wait()
        assert found.is_pinned()
        num_kept = count + 5 * (count // 4) if method == "evs_causal" else 6 * count // 4
        assert found.shape[1] == len(kept) == num_kept
        assert torch.equal(kept, expected[1])
        assert torch.equal(found, expected[0])


def test_a_read_does_not_wait_for_later_work_of_the_device() -> None:
    values = torch.arange(2**20, device=CUDA)
    doubled = 2 * values
    reading = Readback(doubled)
    torch.cuda._sleep(2_000_000_000)  # about a second of later work
    (read,) = reading.wait()
    assert not torch.cuda.current_stream().query()
    assert torch.equal(read, 2 * torch.arange(2**20))


@pytest.mark.parametrize("pruned", [True, False])
def test_kept_rows_are_written_to_shared_memory(pruned: bool) -> None:
    embeds = torch.randn(2, 1777, 768, generator=torch.Generator().manual_seed(0)).bfloat16()
    kept = torch.arange(0, 1777, 2, dtype=torch.int32, device=CUDA) if pruned else None
    expected = embeds[:, ::2] if pruned else embeds
    memory = in_shared_memory(embeds.to(CUDA), kept)
    assert memory is not None
    content = torch.frombuffer(memory.mapped(expected.nbytes, min_bytes=expected.nbytes).data, dtype=torch.bfloat16)
    assert torch.equal(content.view(expected.shape), expected)
