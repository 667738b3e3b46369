"""The embedded embedder through the services: it reads prompts as in its training, and finds clips by texts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from demo.clips import EVALUATION_SEEDS, clip_of
from demo.embedder import INSTRUCTIONS, Reader
from demo.evaluate import encoded
from demo.model import embed
from demo.retrieval import measured, told_by
from demo.train import VIDEO
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Video
from gridsieve.common.checkpoint import DEMO_EMBEDDER
from tests.integration.fleet import Stack, running

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(DEMO_EMBEDDER) as found:
        yield found


async def test_vectors_are_those_of_its_training(stack: Stack) -> None:
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(DEMO_EMBEDDER, dtype=torch.float32).train(False)
    reader = Reader(model, AutoTokenizer.from_pretrained(DEMO_EMBEDDER))
    texts = ["a red circle moves left", "A blue cross."]
    frames = torch.from_numpy(clip_of(EVALUATION_SEEDS))[None]
    with torch.no_grad():
        told = reader.texts(texts, INSTRUCTIONS[0])
        shown = reader.clips(embed(model, frames), torch.arange(VIDEO.tokens)[None], VIDEO, INSTRUCTIONS[0])
    async with GridsieveClient(stack.address) as client:
        for text, expected in zip(texts, told, strict=True):
            np.testing.assert_allclose((await client.embed(None, text)).values, expected, atol=TOLERANCE)
        clip = await client.embed(Video(data=encoded(EVALUATION_SEEDS)))
    # Pillow resizes the frames of the training: pixels differ by a level here and there.
    assert clip.values @ shown[0].numpy() > 0.999


async def test_the_figures_are_of_clips_of_which_all_captions_find_one(stack: Stack) -> None:
    unpruned, pruned = await measured(stack.address, told_by(3), (0.75,), ("evs",))
    assert (unpruned.kept, unpruned.cosine) == (256, pytest.approx(1, abs=1e-5))
    assert pruned.kept == 64
    assert 0.5 < pruned.cosine < 1
    assert (unpruned.at_1, unpruned.at_5, pruned.at_5) == (1, 1, 1)
