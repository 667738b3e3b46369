"""MiniCPM-V 4.6 and 4.7 through three real processes, against transformers' towers and text models."""

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
from gridsieve.client.encoding import Encoded, encode
from gridsieve.client.prompt import Image, Part, Pruning, Text, Video
from gridsieve.common.contract.plan import PromptPlan
from gridsieve.common.contract.retention import EVS, NONE, PIXEL_CHANGE
from tests import media
from tests.families import FAMILIES, QWEN3_5
from tests.families import minicpmv4_6 as oracle
from tests.integration.fleet import running
from tests.integration.reference import CLEAR_MARGIN, NEW_TOKENS
from tests.integration.test_minicpmv import QUESTION, plan_and_frames
from tests.oracle import Expected, expected_logprobs

WIDE, TALL, SMALL = media.picture(300, 130), media.picture(60, 400, seed=1), media.picture(50, 40)
CLIP = media.clip(24, fps=4, width=96, height=64, seed=3)
MIXES: tuple[tuple[str, tuple[Part, ...]], ...] = (
    (NONE, (Image(data=SMALL),)),
    (NONE, (Image(data=WIDE), Text("and"), Video(data=CLIP), Image(data=SMALL), Image(data=TALL))),
    (EVS, (Video(data=CLIP),)),
    (PIXEL_CHANGE, (Video(data=CLIP),)),
)


@pytest.mark.deep  # tests of the encoder and of preprocessing cover what differs from 4.5 and from Qwen3.5
@pytest.mark.parametrize("model_type", ["minicpmv4_7", "minicpmv4_6"])
async def test_embeddings_and_answers_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    model = oracle.write(tmp_path, 1, QWEN3_5["text"], model_type)
    options: Any = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "logprobs": True, "timeout_s": 60}
    with running(tmp_path) as stack:
        async with GridsieveClient(stack.address) as client:
            for method, parts in MIXES:
                answer = await client.ask(list(parts), QUESTION, pruning_rate=0.5, pruning_method=method, **options)
                shown = [part for part in parts if not isinstance(part, Text)]
                encoded = await encode(stack.addresses["encoder"], shown, Pruning(0.5, method))
                plan, sent = await plan_and_frames(stack.addresses["preprocessing"], parts)
                for found, pictures in zip(encoded, sent, strict=True):
                    expected = kept_embeds(model, pictures, found.kept.tolist(), alone=method == PIXEL_CHANGE)
                    torch.testing.assert_close(torch.from_numpy(np.array(found.values[0])), expected, atol=1e-5, rtol=0)
                logprobs = answered(model, plan, encoded, answer.token_ids)
                best, second = logprobs.topk(2).values.T
                assert (best - second > CLEAR_MARGIN).all(), "choose another clip: a tie proves nothing"
                assert answer.token_ids == tuple(logprobs.argmax(-1).tolist())
                assert answer.logprobs == pytest.approx(best.tolist(), abs=1e-4)


def kept_embeds(model: Any, pictures: Sequence[Tensor], kept: Sequence[int], alone: bool) -> Tensor:
    """The embeddings (K, D) of tokens of an item. alone: the tower sees no others of their frame."""
    firsts = list(accumulate((len(each) for each in oracle.features(model, pictures)), initial=0))
    found = list[Tensor]()
    for picture, (first, end) in zip(pictures, pairwise(firsts), strict=True):
        own = [token - first for token in kept if first <= token < end]
        if alone and own:
            found.append(oracle.kept_features(model, picture, own, FAMILIES["minicpmv4_6"].merge))
        elif own:
            found.append(oracle.features(model, [picture])[0][own])
    return torch.cat(found)


def answered(model: Any, plan: PromptPlan, encoded: Sequence[Encoded], answer: Sequence[int]) -> Tensor:
    """Log-probabilities of an answer: one forward of the text model over the tokens that remain of a plan."""
    places = [np.concatenate([np.arange(run.offset, run.end) for run in item.runs]) for item in plan.media]
    sources = {
        int(own[token]): (index, row)
        for index, (own, item) in enumerate(zip(places, encoded, strict=True))
        for row, token in enumerate(item.kept)
    }
    dropped = set(np.concatenate(places).tolist()) - sources.keys()
    rows = [row for row in range(plan.tokens) if row not in dropped]
    expected = Expected(
        ids=plan.input_ids[rows].tolist(),
        rows=[sources.get(row) for row in rows],
        positions=[tuple(plan.positions[:, row].tolist()) for row in rows],
        delta=int(plan.positions.max()) + 1 - len(rows),
    )
    items: Any = [SimpleNamespace(embeds=item.values[0], deepstack=()) for item in encoded]
    linear = model.config.model_type == "minicpmv4_6"
    with torch.no_grad():
        return expected_logprobs(model.model.language_model, model.lm_head, expected, items, answer, linear)
