"""MiniCPM-V through three real processes, against transformers' tower and text model and a plain resampler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gridsieve.client.client import GridsieveClient
from gridsieve.client.messages import generate_request
from gridsieve.client.prompt import Image, Part, Text, Video, user_turn
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import PromptPlan
from tests import media
from tests.families import minicpm
from tests.integration.fleet import running
from tests.integration.reference import CLEAR_MARGIN, NEW_TOKENS, plan_and_slices

QUESTION = "What moves?"
PICTURE, WIDE, TALL = media.picture(50, 40), media.picture(200, 70), media.picture(64, 190, seed=1)
CLIP = media.clip(24, fps=8, width=96, height=64, seed=3)
# Of this length 4.5 makes groups of two frames, the last of which is alone.
LONG = media.clip(300, fps=4, width=48, height=32, seed=4)
IMAGES: dict[str, tuple[Part, ...]] = {
    "an image without slices": (Image(data=PICTURE),),
    "images with slices": (Image(data=WIDE), Text("and"), Image(data=TALL), Image(data=PICTURE)),
}
VIDEOS: dict[str, tuple[Part, ...]] = {
    "a video": (Video(data=CLIP, fps=4),),
    "a video and an image": (Video(data=CLIP), Image(data=WIDE)),
}
SLICED: dict[str, tuple[Part, ...]] = {
    "a video whose frames are sliced, and an image": (Video(data=CLIP, max_slices=3, fps=2), Image(data=WIDE))
}
VERSIONS = ["4.5", *(pytest.param(each, marks=pytest.mark.deep) for each in ("2.5", "2.6", "4.0"))]
GROUPED: dict[str, tuple[Part, ...]] = {"a video in groups": (Video(data=LONG), Image(data=PICTURE))}


@pytest.mark.parametrize("version", VERSIONS)
async def test_answers_are_those_of_the_parts_of_transformers(version: str, tmp_path: Path) -> None:
    oracle = minicpm.write(tmp_path, 1, version)
    more = {"2.5": {}, "4.5": VIDEOS | GROUPED}.get(version, VIDEOS | SLICED)
    mixes = IMAGES | more
    with running(tmp_path) as stack:
        async with GridsieveClient(stack.addresses["generation"]) as client:
            for parts in mixes.values():
                options: Any = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "logprobs": True, "timeout_s": 60}
                answer = await client.ask(list(parts), QUESTION, **options)
                embeds = embedded(oracle, *await plan_and_frames(stack.addresses["preprocessing"], parts))
                check(answer.token_ids, answer.logprobs, oracle, embeds)
            if version == "2.5":
                return
            with pytest.raises(
                InvalidRequest, match=r"pruning\.method must be one of none for this model, got 'evs': a"
            ):
                await client.ask(Video(data=CLIP), QUESTION, pruning_rate=0.5)


async def plan_and_frames(preprocessing: str, parts: Sequence[Part]) -> tuple[PromptPlan, list[list[Tensor]]]:
    """The plan, and the pictures of each item, uint8 (H, W, 3)."""
    prompt = generate_request([user_turn(list(parts), QUESTION)], {}).prompt
    plan, slices = await plan_and_slices(preprocessing, prompt)
    pictures: list[list[Tensor]] = [[] for _ in plan.media]
    for (index, first), data in sorted(slices.items()):
        pixels = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        pictures[index] += pixels.view(-1, *plan.media[index].frame_px(first), 3).unbind()
    return plan, pictures


@torch.no_grad()
def embedded(oracle: minicpm.MiniCPM, plan: PromptPlan, pictures: Sequence[Sequence[Tensor]]) -> Tensor:
    """The embeddings of the whole prompt: (1, N, D)."""
    embeds: Tensor = oracle.llm.get_input_embeddings()(torch.from_numpy(plan.input_ids.astype(np.int64)))
    for item, shown in zip(plan.media, pictures, strict=True):
        places = torch.cat([torch.arange(run.offset, run.end) for run in item.runs])
        if item.frames.group_frames:
            frames, times = torch.stack(list(shown)), [int(round(10 * time) * 0.1 / 0.1) for time in item.timestamps_s]
            starts = range(0, len(frames), item.frames.group_frames)
            groups = [slice(start, start + item.frames.group_frames) for start in starts]
            embeds[places] = torch.cat([oracle.group(frames[each], times[each]) for each in groups])
        else:
            embeds[places] = torch.cat([oracle.picture(each) for each in shown])
    return embeds[None]


@torch.no_grad()
def check(token_ids: Sequence[int], logprobs: Sequence[float] | None, oracle: minicpm.MiniCPM, embeds: Tensor) -> None:
    """The answer is greedy, and its log-probabilities are those of one forward over prompt and answer."""
    answer = oracle.llm.get_input_embeddings()(torch.tensor([token_ids]))
    logits = oracle.llm(inputs_embeds=torch.cat([embeds, answer], dim=1)).logits[0, embeds.shape[1] - 1 : -1]
    found = logits.log_softmax(-1)
    for place, (token, logprob) in enumerate(zip(token_ids, logprobs or (), strict=True)):
        best = logits[place].topk(2)
        assert token == int(best.indices[0]) or float(best.values[0] - best.values[1]) < CLEAR_MARGIN
        assert logprob == pytest.approx(float(found[place, token]), abs=1e-4)
