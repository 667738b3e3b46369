"""MiniCPM-V 4.6 and 4.7 through preprocessing and the encoder as processes, against transformers' tower."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from framesieve.client.encoding import encode
from framesieve.client.prompt import Image, Pruning, Video
from framesieve.common.contract.errors import InvalidRequest
from tests import media
from tests import minicpmv4_6 as oracle
from tests.families import QWEN3_5
from tests.integration.fleet import Service
from tests.integration.test_minicpmv import plan_and_frames

WIDE, TALL, SMALL = media.picture(300, 130), media.picture(60, 400, seed=1), media.picture(50, 40)
CLIP = media.clip(24, fps=4, width=96, height=64, seed=3)


@pytest.mark.parametrize("model_type", ["minicpmv4_6", pytest.param("minicpmv4_7", marks=pytest.mark.deep)])
async def test_embeddings_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    model = oracle.write(tmp_path / "model", 1, QWEN3_5["text"], model_type)
    preprocessing = Service("preprocessing", tmp_path / "model", tmp_path, ("--decode-workers", "1"))
    flags = ("--preprocessing", preprocessing.address, "--threads", "1")
    encoder = Service("encoder", tmp_path / "model", tmp_path, flags)
    try:
        for each in (preprocessing, encoder):
            each.start()
        for each in (preprocessing, encoder):
            each.ready()
        parts = Image(data=WIDE), Image(data=SMALL), Video(data=CLIP), Image(data=TALL)
        plan, sent = await plan_and_frames(preprocessing.address, parts)
        encoded = await encode(encoder.address, parts)
        for item, found, pictures in zip(plan.media, encoded, sent, strict=True):
            expected = torch.cat(oracle.features(model, pictures))
            assert item.grid.tokens == len(expected)
            torch.testing.assert_close(torch.from_numpy(np.array(found.values[0])), expected, atol=1e-5, rtol=0)
        with pytest.raises(InvalidRequest, match=r"pruning\.method must be one of none for this model, got 'evs'"):
            await encode(encoder.address, Video(data=CLIP), Pruning(rate=0.5))
    finally:
        for each in (preprocessing, encoder):
            each.close()
