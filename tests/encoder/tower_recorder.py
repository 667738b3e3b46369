"""Records a tower's graphs without CUDA, with variable-length attention by its formula.

A replay computes the captured function again, and requires that every input was written since the last replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.compute.graphs import Captured
from gridsieve.services.encoder.tower import vision_model
from gridsieve.services.encoder.tower.graphs import with_graphs
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.patches import Frames
from gridsieve.services.encoder.tower.tower import Tower
from tests.generation.recorder import NoSynchronisation

CPU = torch.device("cpu")
STALE_BYTE, FAR_AWAY = 255, 2**30


class Recorder:
    """A `Device` whose replays take 1 s and whose other forwards take eager_s. captured, replayed: rows of patches."""

    def __init__(self, eager_s: float = 1.0) -> None:
        self._eager_s = eager_s
        self.captured: list[int] = []
        self.replayed: list[int] = []

    def __call__(self, inputs: Sequence[Tensor], compute: Callable[[], Tensor]) -> Captured:
        self.captured.append(len(inputs[0]))
        with NoSynchronisation(), patch.object(Tensor, "tolist", side_effect=AssertionError("the host would wait")):
            output = compute().fill_(torch.nan)

        def replay() -> None:
            assert not any((each == stale(each)).any() or each.isnan().any() for each in inputs)
            self.replayed.append(len(inputs[0]))
            output.copy_(compute())
            for each in inputs:
                each.fill_(stale(each))

        for each in inputs:
            each.fill_(stale(each))
        return Captured(replay, output)

    def measure_s(self, run: Callable[[], object]) -> float:
        replays = len(self.replayed)
        run()
        return 1.0 if len(self.replayed) > replays else self._eager_s


def stale(buffer: Tensor) -> float:
    if buffer.is_floating_point():
        return torch.nan
    return STALE_BYTE if buffer.dtype == torch.uint8 else FAR_AWAY


def load_packed(checkpoint: Path) -> Tower:
    """A tower with variable-length attention, as on CUDA."""
    with patch.object(vision_model, "find_attention", return_value=attend_by_formula):
        return load_tower(Checkpoint(checkpoint), "float32", CPU)


def assert_replays(checkpoint: Path, slices: Sequence[Frames], most_tokens: int = 160) -> None:
    """That graphs are replayed for these slices, and compute what the tower computes without them."""
    tower, recorder = load_packed(checkpoint), Recorder()
    graphed = with_graphs(tower, most_tokens, recorder)
    recorder.replayed.clear()
    for ours, theirs in zip(graphed.encode(slices), tower.encode(slices), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert recorder.replayed


def attend_by_formula(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int
) -> Tensor:
    """softmax(q kᵀ / √d) v of each sequence; NaN in rows of no sequence, which a kernel leaves unwritten."""
    assert ends_q.dtype == ends_k.dtype == torch.int32
    asking, known = ends_q.numpy(), ends_k.numpy()
    assert asking[0] == known[0] == 0
    found = torch.full_like(query, torch.nan)
    for (start, end), (first, last) in zip(pairwise(asking), pairwise(known), strict=True):
        assert 0 <= end - start <= max_q
        assert 0 <= last - first <= max_k
        if start == end:  # as of most windows of a bucket
            continue
        rows, columns = slice(start, end), slice(first, last)
        scores = torch.einsum("rhd,chd->hrc", query[rows], key[columns]) * query.shape[-1] ** -0.5
        found[rows] = torch.einsum("hrc,chd->rhd", scores.softmax(-1), value[columns])
    return found
