"""Generation behind an encoder whose plan lies in a single field: each lie is found before anything is made of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from common.channels import open_channel
from common.checkpoint import Checkpoint
from common.plan import PromptPlan
from common.wire import plan_messages
from framesieve.v1 import prompt_pb2
from framesieve.v1.encoder_pb2 import EncodeResponse
from framesieve.v1.generation_pb2 import Sampling
from tests.contract.generation_peers import prompt_plan
from tests.contract.generation_service import (
    TEXT_AFTER,
    TEXT_BEFORE,
    VIDEO,
    answers,
    refused,
    service_of,
    token_ids,
)
from tests.contract.loopback import eventually, speaking


def positions_of_2_31(plan: prompt_pb2.PromptPlan) -> None:
    plan.layout.data = plan.layout.data[:-4] + np.int32(2**31 - 1).tobytes()


def a_token_of_no_vocabulary(plan: prompt_pb2.PromptPlan) -> None:
    plan.layout.data = np.int32(2**31 - 1).tobytes() + plan.layout.data[4:]


def frames_of_one_pixel(plan: prompt_pb2.PromptPlan) -> None:
    """Too few for their grid, by which what would fit is told."""
    plan.media[0].frame_height_px = plan.media[0].frame_width_px = 1


def a_frame_of_2_31_pixels(plan: prompt_pb2.PromptPlan) -> None:
    plan.media[0].frame_height_px = 2**31 - 1


def a_grid_whose_product_overflows(plan: prompt_pb2.PromptPlan) -> None:
    plan.media[0].grid.t = plan.media[0].grid.h = plan.media[0].grid.w = 2**31 - 1


def seconds_of_nothing_by_nothing(plan: prompt_pb2.PromptPlan) -> None:
    plan.media[0].seconds_per_grid.numerator = plan.media[0].seconds_per_grid.denominator = 0


def another_checkpoint(plan: prompt_pb2.PromptPlan) -> None:
    plan.fingerprint = bytes(32)


def levels_of_another_family(plan: prompt_pb2.PromptPlan) -> None:
    plan.embed_levels = 3


LIES = (
    positions_of_2_31,
    a_token_of_no_vocabulary,
    frames_of_one_pixel,
    a_frame_of_2_31_pixels,
    a_grid_whose_product_overflows,
    seconds_of_nothing_by_nothing,
    another_checkpoint,
    levels_of_another_family,
)


def plan_for(checkpoint: Path) -> PromptPlan:
    return prompt_plan(Checkpoint(checkpoint).fingerprint, TEXT_BEFORE, VIDEO, TEXT_AFTER)


async def test_metadata_of_a_lying_peer_breaks_the_contract(tmp_path: Path, tiny_checkpoint: Path) -> None:
    sent: list[bytes] = []

    async def lying(requests: Any, context: Any) -> AsyncIterator[bytes]:
        await context.read()
        for each in sent:
            yield each

    address = f"unix:{tmp_path}/liar"
    async with (
        speaking(address, "/framesieve.v1.EncoderService/Encode", lying),
        open_channel(address) as liar,
        service_of(tmp_path, tiny_checkpoint, encoder_channel=liar) as service,
    ):
        for lie in LIES:
            (plan,) = plan_messages(plan_for(tiny_checkpoint))
            lie(plan)
            sent[:] = [EncodeResponse(plan=plan).SerializeToString()]
            # An answer that cannot fit, so that what would is looked for.
            code, reason, _ = await refused(service.ask(sampling=Sampling(max_new_tokens=10_000)))
            assert (lie.__name__, code, reason) == (lie.__name__, grpc.StatusCode.INTERNAL, "PEER_CONTRACT")
        await eventually(service.idle)
        assert len(token_ids(await answers(service.ask_text()))) == 5
