"""With --deterministic an answer has the same bits whatever is computed with it, before it, and in whichever chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.generation.loading.mtp import load_mtp
from gridsieve.services.generation.model.determinism import CPU_ROWS, made_deterministic
from gridsieve.services.generation.settings import GenerationSettings
from gridsieve.services.generation.startup.same_bits import use_equal_sizes
from tests.drafts import write_mtp
from tests.generation.paged_kernels import PlainKernel, use_paged
from tests.law import Question, answer, assert_law
from tests.oracle import Text
from tests.tiny import BLOCK_TOKENS, Models, TinyEngine, load_models, random_item

# Dense with levels that are added to rows; a mixture; recurrent states of each kind, of which the last is a mixture.
KINDS = ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", pytest.param("nemotron_h_omni", marks=pytest.mark.deep)]
NEW_TOKENS = 4
# Ten services, each of which is asked four times. The prompt has 35 tokens.
SERVICES: list[Mapping[str, Any]] = [
    {},
    {"max_num_batched_tokens": 5},
    {"max_num_batched_tokens": 16, "overlap": True},
    {"max_num_batched_tokens": 512, "snapshots": 0},
    {"max_draft_tokens": 3},
    {"max_draft_tokens": 1, "max_num_batched_tokens": 7, "max_num_seqs": 3},
    {"max_draft_tokens": 3, "head": True},
    {"max_draft_tokens": 2, "head": True, "max_num_batched_tokens": 9},
    {"blocks": 15},
    {"blocks": 15, "max_num_batched_tokens": 11, "max_draft_tokens": 2},
]


@pytest.fixture(scope="module", params=KINDS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return load_models(request.param, tmp_path_factory.mktemp(request.param))


def asked(models: Models) -> Question:
    """Repeats itself, so that prompt lookup finds drafts."""
    video = random_item(models.family, (4, 2, 2), Fraction(1), rate=0.5)
    picture = random_item(models.family, (1, 2, 2), None, seed=6)
    opening = Text((30, 31, 32, 33) * 3)
    return Question((opening, video, Text((32,)), picture, Text((30, 31, 32))), NEW_TOKENS, kept_seed=1)


def under_forty_conditions(models: Models, head: Any = None) -> Iterator[tuple[TinyEngine, list[Tensor]]]:
    """Of each service, the logits of each token of four answers: alone; again; among others; with a second answer."""
    question = asked(models)
    others = [Question((Text(tuple(range(40 + n, 50 + 9 * n))),), 9) for n in range(3)]
    for settings in SERVICES:
        named = {"blocks": 64, **settings}
        engine = TinyEngine(replace(models.engine, draft=head if named.pop("head", False) else None), **named)
        found = []
        for questions, arrivals in (
            ([question], ()),
            ([question], ()),
            ([*others, question], (0, 1, 1, 2)),
            ([replace(question, answers=2)], ()),
        ):
            request = answer(engine, questions, arrivals)[-1].request
            found.append(torch.stack(engine.runner.logits[request.id]))
        yield engine, found


def test_one_question_under_forty_conditions_has_one_answer_to_the_last_bit(models: Models) -> None:
    head = None
    if models.family.model_type == "qwen3_5":
        head = load_mtp(Checkpoint(write_mtp(models.folder)), models.engine)
    made = replace(models, engine=made_deterministic(models.engine))
    answers, totals = list[Tensor](), dict[str, int]()
    for engine, found in under_forty_conditions(made, head):
        answers += found
        for name, count in engine.totals.items():
            totals[name] = totals.get(name, 0) + count
    assert len(answers) == 40
    assert min(totals[name] for name in ("preemptions", "draft_tokens")) > 0
    different = [number for number, each in enumerate(answers) if not torch.equal(each, answers[0])]
    assert not different


def test_without_it_answers_differ(models: Models) -> None:
    first, *others = (each for _, found in under_forty_conditions(models) for each in found)
    assert not all(torch.equal(each, first) for each in others)
