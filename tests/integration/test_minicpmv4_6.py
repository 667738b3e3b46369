"""MiniCPM-V 4.6 and 4.7 through three real processes, against transformers' whole models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gridsieve.client.client import GridsieveClient
from gridsieve.client.encoding import encode
from gridsieve.client.prompt import Image, Part, Pruning, Text, Video
from gridsieve.common.contract.plan import Modality, PromptPlan
from gridsieve.common.contract.retention import EVS, PIXEL_CHANGE
from tests import media
from tests.families import FAMILIES, QWEN3_5
from tests.families import minicpmv4_6 as oracle
from tests.integration.conftest import running
from tests.integration.reference import CLEAR_MARGIN, NEW_TOKENS
from tests.integration.test_minicpmv import QUESTION, plan_and_frames
from tests.oracle import Expected, expected_logprobs

WIDE, TALL, SMALL = media.picture(300, 130), media.picture(60, 400, seed=1), media.picture(50, 40)
CLIP = media.clip(24, fps=4, width=96, height=64, seed=3)
PRUNED = Video(data=CLIP)
MIXES: tuple[tuple[Part, ...], ...] = (
    (Image(data=SMALL),),
    (Image(data=WIDE), Text("and"), Video(data=CLIP), Image(data=SMALL), Image(data=TALL)),
)


@pytest.mark.deep  # tests of the encoder and of preprocessing cover what differs from 4.5 and from Qwen3.5
@pytest.mark.parametrize("model_type", ["minicpmv4_7", "minicpmv4_6"])
async def test_embeddings_and_answers_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    model = oracle.write(tmp_path, 1, QWEN3_5["text"], model_type)
    options: Any = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "logprobs": True, "timeout_s": 60}
    with running(tmp_path) as stack:
        async with GridsieveClient(stack.addresses["generation"]) as client:
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
            for method in (EVS, PIXEL_CHANGE):
                answer = await client.ask(PRUNED, QUESTION, pruning_rate=0.5, pruning_method=method, **options)
                (found,) = await encode(stack.addresses["encoder"], PRUNED, Pruning(0.5, method))
                plan, (pictures,) = await plan_and_frames(stack.addresses["preprocessing"], [PRUNED])
                embeds = kept_embeds(model, pictures, found.kept.tolist(), alone=method == PIXEL_CHANGE)
                torch.testing.assert_close(torch.from_numpy(np.array(found.values[0])), embeds, atol=1e-5, rtol=0)
                logprobs = pruned(model, plan, found.kept.tolist(), embeds, answer.token_ids)
                assert answer.token_ids == tuple(logprobs.argmax(-1).tolist())
                assert answer.logprobs == pytest.approx(logprobs.amax(-1).tolist(), abs=1e-4)


def kept_embeds(model: Any, pictures: Sequence[Tensor], kept: Sequence[int], alone: bool) -> Tensor:
    """The embeddings (K, D) of tokens of a video. alone: the tower sees no others of their frame."""
    firsts = list(accumulate((len(each) for each in oracle.features(model, pictures)), initial=0))
    found = list[Tensor]()
    for picture, (first, end) in zip(pictures, pairwise(firsts), strict=True):
        own = [token - first for token in kept if first <= token < end]
        if alone and own:
            found.append(oracle.kept_features(model, picture, own, FAMILIES["minicpmv4_6"].merge))
        elif own:
            found.append(oracle.features(model, [picture])[0][own])
    return torch.cat(found)


def pruned(model: Any, plan: PromptPlan, kept: Sequence[int], embeds: Tensor, answer: Sequence[int]) -> Tensor:
    """Log-probabilities of an answer: one forward of the text model over the tokens that remain of a plan."""
    places = np.concatenate([np.arange(run.offset, run.end) for run in plan.media[0].runs])
    sources = dict(zip(places[list(kept)].tolist(), ((0, row) for row in range(len(kept))), strict=True))
    rows = [row for row in range(plan.tokens) if row in sources or row not in places]
    positions = [tuple(plan.positions[:, row].tolist()) for row in rows]
    expected = Expected(
        ids=plan.input_ids[rows].tolist(),
        rows=[sources.get(row) for row in rows],
        positions=positions,
        delta=int(plan.positions.max()) + 1 - len(rows),
    )
    item: Any = SimpleNamespace(embeds=embeds.numpy(), deepstack=())
    linear = model.config.model_type == "minicpmv4_6"
    with torch.no_grad():
        return expected_logprobs(model.model.language_model, model.lm_head, expected, [item], answer, linear)


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
