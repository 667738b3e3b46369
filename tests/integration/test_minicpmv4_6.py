"""MiniCPM-V 4.6 and 4.7 through three real processes, against transformers' whole models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from framesieve.client.client import FramesieveClient
from framesieve.client.encoding import encode
from framesieve.client.prompt import Image, Part, Text, Video
from framesieve.common.contract.errors import InvalidRequest
from framesieve.common.contract.plan import Modality, PromptPlan
from tests import media
from tests import minicpmv4_6 as oracle
from tests.families import QWEN3_5
from tests.integration.conftest import running
from tests.integration.reference import CLEAR_MARGIN, NEW_TOKENS
from tests.integration.test_minicpmv import QUESTION, plan_and_frames

WIDE, TALL, SMALL = media.picture(300, 130), media.picture(60, 400, seed=1), media.picture(50, 40)
CLIP = media.clip(24, fps=4, width=96, height=64, seed=3)
MIXES: tuple[tuple[Part, ...], ...] = (
    (Image(data=SMALL),),
    (Image(data=WIDE), Text("and"), Video(data=CLIP), Image(data=SMALL), Image(data=TALL)),
)


@pytest.mark.parametrize("model_type", ["minicpmv4_7", pytest.param("minicpmv4_6", marks=pytest.mark.deep)])
async def test_embeddings_and_answers_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    model = oracle.write(tmp_path, 1, QWEN3_5["text"], model_type)
    options: Any = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "logprobs": True, "timeout_s": 60}
    with running(tmp_path) as stack:
        async with FramesieveClient(stack.addresses["generation"]) as client:
            for parts in MIXES:
                plan, sent = await plan_and_frames(stack.addresses["preprocessing"], parts)
                shown = [part for part in parts if not isinstance(part, Text)]
                encoded = await encode(stack.addresses["encoder"], shown)
                for found, pictures in zip(encoded, sent, strict=True):
                    expected = torch.cat(oracle.features(model, pictures))
                    torch.testing.assert_close(torch.from_numpy(np.array(found.values[0])), expected, atol=1e-5, rtol=0)
                answer = await client.ask(list(parts), QUESTION, **options)
                logits = answered(model, plan, sent, answer.token_ids)
                found_log, best = logits.log_softmax(-1), logits.topk(2).values
                for place, (token, logprob) in enumerate(zip(answer.token_ids, answer.logprobs or (), strict=True)):
                    assert token == int(logits[place].argmax()) or best[place, 0] - best[place, 1] < CLEAR_MARGIN
                    assert logprob == pytest.approx(float(found_log[place, token]), abs=1e-4)
            with pytest.raises(
                InvalidRequest, match=r"pruning\.method must be one of none for this model, got 'evs': no method"
            ):
                await client.ask(Video(data=CLIP), QUESTION, pruning_rate=0.5)


@torch.no_grad()
def answered(model: Any, plan: PromptPlan, sent: Sequence[Sequence[Tensor]], answer: Sequence[int]) -> Tensor:
    """The logits of each token of an answer, from one forward of the whole model over prompt and answer."""
    ids = torch.tensor([[*plan.input_ids.tolist(), *answer]])
    inputs: dict[str, Any] = {}
    for modality, suffix in ((Modality.IMAGE, ""), (Modality.VIDEO, "_videos")):
        shown = [
            each
            for item, pictures in zip(plan.media, sent, strict=True)
            if item.modality is modality
            for each in pictures
        ]
        if shown:
            sides = [[each.shape[0] // oracle.PATCH_PX, each.shape[1] // oracle.PATCH_PX] for each in shown]
            inputs |= {f"pixel_values{suffix}": oracle.packed(shown), f"target_sizes{suffix}": torch.tensor(sides)}
    if model.config.model_type == "minicpmv4_7":
        kinds = (ids == model.config.image_token_id) + 2 * (ids == model.config.video_token_id)
        inputs["mm_token_type_ids"] = kinds
    logits: Tensor = model(input_ids=ids, **inputs).logits[0, plan.tokens - 1 : -1]
    return logits
