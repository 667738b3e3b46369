"""Plans for the wire, and a receiver of their messages."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from common.contract import wire
from common.contract.plan import MAX_POSITION, Grid, MediaPlan, Modality, PromptPlan, Run
from framesieve.v1 import prompt_pb2


def video(offset: int, grid: Grid) -> MediaPlan:
    return MediaPlan(
        modality=Modality.VIDEO,
        grid=grid,
        runs=(Run(offset, grid.tokens),),
        frames=2 * grid.t,
        frame_height_px=28 * grid.h,
        frame_width_px=28 * grid.w,
        seconds_per_grid=Fraction(1001, 1000),
        timestamps_s=tuple(0.5 * i for i in range(2 * grid.t)),
        content_hash=bytes(range(32)),
    )


def plan_of(tokens: int, *media: MediaPlan) -> PromptPlan:
    rng = np.random.default_rng(tokens)
    return PromptPlan(
        input_ids=rng.integers(0, 2**31 - 1, tokens, dtype=np.int32),
        positions=rng.integers(0, MAX_POSITION, (3, tokens), dtype=np.int32),
        media=media,
        embed_levels=0,
        fingerprint=b"f" * 32,
    )


def receive(messages: list[prompt_pb2.PromptPlan]) -> PromptPlan | None:
    receiver = wire.PlanReceiver()
    plans = [receiver.add(message) for message in messages]
    assert plans[:-1] == [None] * (len(plans) - 1)
    return plans[-1]
