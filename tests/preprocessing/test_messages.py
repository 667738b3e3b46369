"""What stands in the first piece of a plan or a slice alone."""

from __future__ import annotations

from time import monotonic_ns

import numpy as np

from common.contract.plan import PromptPlan
from services.preprocessing.rpc.messages import frames_responses, plan_responses
from services.preprocessing.video.slices import Slice

TOKENS = 200_000


def test_a_plan_says_in_its_first_piece_when_media_had_been_fetched() -> None:
    ids = np.zeros(TOKENS, np.int32)
    plan = PromptPlan(ids, np.tile(ids, (3, 1)), (), 0, bytes(32))
    first, *others = plan_responses(plan, monotonic_ns() - 10**9)
    assert others
    assert first.fetched_ago_s >= 1
    assert not any(each.HasField("fetched_ago_s") for each in others)
    assert not any(each.HasField("fetched_ago_s") for each in plan_responses(plan, None))


def test_a_slice_says_in_its_first_piece_when_it_was_made_and_what_of_it_was_repaired() -> None:
    now_ns = monotonic_ns()
    pixels = np.zeros((2, 1000, 1000, 3), np.uint8)
    made = Slice(0, pixels, 1, 0.5, 0.5, decoded_ns=now_ns - 3 * 10**9, resized_ns=now_ns - 2 * 10**9)
    first, *others = (response.frames for response in frames_responses(7, made))
    assert others
    assert first.repaired_frames == 1
    assert first.decoded_ago_s >= 3
    assert first.decoded_ago_s > first.resized_ago_s >= 2
    assert {(each.repaired_frames, each.decoded_ago_s, each.resized_ago_s) for each in others} == {(0, 0.0, 0.0)}
