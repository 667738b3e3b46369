"""The grammar of moments, whatever a model prefers: tokens that are drawn at random among those that it allows."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from gridsieve.common.checkpoint import DEMO_MODEL
from gridsieve.common.contract.plan import FrameShape, Grid, MediaPlan, Modality, PromptPlan, Run
from gridsieve.services.generation.sampling.moments import MomentsFormat, Notation, moments_rules

FPS, SLICES = 2, (12, 1, 40)


def plan() -> PromptPlan:
    """Three videos of two frames a slice, a token each; the one of one slice has two times, its own and its end."""
    media, offset = list[MediaPlan](), 1
    for slices in SLICES:
        times = tuple(frame / FPS for frame in range(2 * slices))
        shape = FrameShape(2 * slices, (28, 28))
        runs = (Run(offset, slices),)
        media.append(MediaPlan(Modality.VIDEO, Grid(slices, 1, 1), runs, shape, Fraction(2, FPS), times, bytes(32)))
        offset += slices + 1
    ids = np.zeros(offset, np.int32)
    return PromptPlan(ids, np.zeros((3, offset), np.int32), tuple(media), 0, bytes(32))


@pytest.mark.parametrize("answers", [100, pytest.param(10_000, marks=[pytest.mark.deep, pytest.mark.timeout(1200)])])
def test_no_answer_has_a_time_outside_of_its_video(answers: int) -> None:
    tokenizer = LLTokenizer((DEMO_MODEL / "tokenizer.json").read_text())
    rules = "\n".join(("start: document", *moments_rules(plan(), MomentsFormat(), Notation()), ""))
    began = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(rules))
    rng, told = np.random.default_rng(0), set[int]()
    quote = tokenizer.tokenize_str('"')[0]
    for _ in range(answers):
        matcher, ids = began.deep_copy(), list[int]()
        while not matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
            # Within a description: mostly its end.
            ids.append(quote if len(allowed) > 200 and rng.random() < 0.8 else int(rng.choice(allowed)))
            assert matcher.consume_token(ids[-1])
        moments = json.loads(tokenizer.decode_str([each for each in ids if each != tokenizer.eos_token]))
        told.add(len(moments))
        for moment in moments:
            last_s = (2 * SLICES[moment["video"] - 1] - 1) / FPS
            middles = [slice_ + 0.5 / FPS for slice_ in range(SLICES[moment["video"] - 1])]
            times = {float(f"{time_s:.1f}") for time_s in (*middles, last_s)}
            assert {moment["start_time"], moment["end_time"]} <= times
            assert moment["start_time"] < moment["end_time"] <= last_s
        assert all(
            (one["video"], one["start_time"]) <= (next_["video"], next_["start_time"])
            for one, next_ in pairwise(moments)
        )
    assert len(told) > 2
