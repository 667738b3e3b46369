"""With --deterministic a slice has the same embeddings to the last bit, whatever is encoded at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gridsieve.services.encoder.items.batcher import Batcher
from gridsieve.services.encoder.settings import EncoderSettings
from gridsieve.services.encoder.startup.build import parallel_tower
from gridsieve.services.encoder.tower.patches import Frames
from tests.common.loopback import TIMEOUT_S


@pytest.mark.parametrize(("flags", "expected"), [(["--deterministic"], [1, 1, 1]), ([], [3])])
def test_each_slice_is_a_forward_of_its_own(levels_checkpoint: Path, flags: Sequence[str], expected: list[int]) -> None:
    settings = EncoderSettings.load(["--model", str(levels_checkpoint), "--device", "cpu", *flags])
    draw = torch.Generator().manual_seed(0)
    forwards = list[int]()
    with parallel_tower(settings) as towers:

        def encode(batch: Sequence[Frames], adapter: bytes) -> Sequence[Tensor]:
            forwards.append(len(batch))
            return towers.encode(batch, adapter)

        batcher, shape = Batcher(encode, towers.packing), towers.own.patches
        slices = [
            torch.randint(0, 256, (2, side * shape.token_px, 3 * shape.token_px, 3), generator=draw, dtype=torch.uint8)
            for side in (2, 3, 4)
        ]
        alone = [towers.own.encode([each])[0] for each in slices]
        targets = [torch.empty_like(each) for each in alone]
        encoded = [batcher.submit(each, target) for each, target in zip(slices, targets, strict=True)]
        batcher.start()
        for each in encoded:
            each.result(TIMEOUT_S)
        batcher.close()
    assert forwards == expected
    if flags:
        assert all(torch.equal(*each) for each in zip(targets, alone, strict=True))
