"""The same code on a CUDA device: what the CPU computes, within rounding."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch

from common.checkpoint import Checkpoint
from services.encoder.families import load_tower
from services.generation.families import load_language_model
from services.generation.sampler import SamplingParams
from tests.families import FAMILIES
from tests.oracle import Text, kept_tokens
from tests.tiny import TinyEngine, random_item

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

DEVICES = [torch.device("cpu"), torch.device("cuda")]
TOLERANCE = 1e-3


def test_the_tower_encodes_as_on_the_cpu(family: str, family_checkpoint: Path) -> None:
    sides = (4 * FAMILIES[family].token_px, 3 * FAMILIES[family].token_px)
    frames = torch.randint(0, 256, (2, *sides, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    on_cpu, on_cuda = (
        load_tower(Checkpoint(family_checkpoint), "float32", device).encode([frames])[0].cpu() for device in DEVICES
    )
    assert torch.allclose(on_cpu, on_cuda, atol=TOLERANCE)


@pytest.mark.parametrize("chunk_tokens", [3, 64])
def test_the_engine_computes_the_cpus_logits(family: str, family_checkpoint: Path, chunk_tokens: int) -> None:
    video = random_item(FAMILIES[family], (4, 2, 3), Fraction(1), rate=0.5)
    params = SamplingParams(max_new_tokens=4)
    found = []
    for device in DEVICES:
        model = load_language_model(Checkpoint(family_checkpoint), torch.float32, device)
        tiny = TinyEngine(model, chunk_tokens=chunk_tokens)
        asked = tiny.ask("video", [Text((10, 11, 12)), video, Text((13, 14))], params)
        tiny.deliver(asked, 0, video, kept_tokens(video, 0))
        tiny.drain()
        found.append(torch.stack([row.cpu() for row in tiny.runner.logits["video"]]))
    assert torch.allclose(found[0], found[1], atol=TOLERANCE)
