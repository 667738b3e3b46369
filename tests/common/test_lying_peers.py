"""Generation behind peers that lie in a single field: each lie is found before anything is made of it.

Peers here speak as they like, for what they say could not be made with our own classes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from common.channels import open_channel
from common.checkpoint import Checkpoint
from common.contract.plan import PromptPlan
from common.contract.wire import plan_messages
from framesieve.v1 import prompt_pb2, tensor_pb2
from framesieve.v1.encoder_pb2 import EncodeResponse
from framesieve.v1.generation_pb2 import Sampling
from framesieve.v1.preprocessing_pb2 import FramesChunk, PreprocessResponse
from tests.common.loopback import eventually, speaking
from tests.generation.generation_peers import embeds_messages, prompt_plan
from tests.generation.generation_service import (
    HIDDEN,
    KEPT,
    TEXT_AFTER,
    TEXT_BEFORE,
    VIDEO,
    Service,
    answers,
    refused,
    service_of,
    token_ids,
    video_items,
)


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


def a_medium_that_nobody_asked_for(plan: prompt_pb2.PromptPlan) -> None:
    (sent,) = plan_messages(prompt_plan(bytes(32), 1, VIDEO))
    plan.media.extend(sent.media)


def a_token_below_0(plan: prompt_pb2.PromptPlan) -> None:
    plan.layout.data = np.int32(-1).tobytes() + plan.layout.data[4:]


def a_position_below_0(plan: prompt_pb2.PromptPlan) -> None:
    plan.layout.data = plan.layout.data[:-4] + np.int32(-1).tobytes()


def no_tokens(plan: prompt_pb2.PromptPlan) -> None:
    plan.layout.shape[1] = 0
    plan.layout.data = b""


def more_tokens_than_any_prompt(plan: prompt_pb2.PromptPlan) -> None:
    plan.layout.shape[1] = 2**31 - 1


def a_million_axes(plan: prompt_pb2.PromptPlan) -> None:
    plan.layout.shape.extend([1] * 10**6)


def a_layout_of_floats(plan: prompt_pb2.PromptPlan) -> None:
    plan.layout.dtype = tensor_pb2.DTYPE_FLOAT32


def a_layout_that_ends_early(plan: prompt_pb2.PromptPlan) -> None:
    plan.layout.data = plan.layout.data[:-4]


def seconds_of_nothing_by_nothing(plan: prompt_pb2.PromptPlan) -> None:
    plan.media[0].seconds_per_grid.numerator = plan.media[0].seconds_per_grid.denominator = 0


def another_checkpoint(plan: prompt_pb2.PromptPlan) -> None:
    plan.fingerprint = bytes(32)


def levels_of_another_family(plan: prompt_pb2.PromptPlan) -> None:
    plan.embed_levels = 3


LIES_ABOUT_ANY_PROMPT = (
    positions_of_2_31,
    a_token_of_no_vocabulary,
    a_medium_that_nobody_asked_for,
    a_token_below_0,
    a_position_below_0,
    no_tokens,
    more_tokens_than_any_prompt,
    a_million_axes,
    a_layout_of_floats,
    a_layout_that_ends_early,
    another_checkpoint,
    levels_of_another_family,
)
LIES = (
    *LIES_ABOUT_ANY_PROMPT,
    frames_of_one_pixel,
    a_frame_of_2_31_pixels,
    a_grid_whose_product_overflows,
    seconds_of_nothing_by_nothing,
)

# (offset, length) of the video's 24 tokens, which stand at 7 of 36.
LYING_RUNS: dict[str, list[tuple[int, int]]] = {
    "none": [],
    "too few": [(7, 23)],
    "an overlap": [(7, 16), (15, 8)],
    "another order": [(19, 12), (7, 12)],
    "begins below 0": [(-1, 24)],
    "less than nothing": [(7, 30), (37, -6)],
    "nothing": [(7, 24), (31, 0)],
    "ends after the prompt": [(13, 24)],
    "begins at 2^63": [(2**63 - 1, 24)],
    "2^31 tokens": [(7, 2**31 - 1)],
}

EMBEDS = np.random.default_rng(5).standard_normal((1, len(KEPT), HIDDEN), np.float32)


def embeds_with(value: float) -> list[EncodeResponse]:
    embeds = EMBEDS.copy()
    embeds[0, -1, -1] = value
    return embeds_messages(0, embeds, KEPT)


def embeds_of_another_type() -> list[EncodeResponse]:
    messages = embeds_messages(0, EMBEDS, KEPT)
    for message in messages:
        message.embeds.chunk.dtype = tensor_pb2.DTYPE_INT32
    return messages


LYING_ITEMS: dict[str, list[EncodeResponse]] = {
    "kept falls": embeds_messages(0, EMBEDS, [*KEPT[:-2], 23, 20]),
    "kept repeats": embeds_messages(0, EMBEDS, [0, 0, *KEPT[2:]]),
    "kept begins below 0": embeds_messages(0, EMBEDS, [-1, *KEPT[1:]]),
    "kept ends after the grid": embeds_messages(0, EMBEDS, [*KEPT[:-1], 24]),
    "kept ends at 2^31": embeds_messages(0, EMBEDS, [*KEPT[:-1], 2**31 - 1]),
    "kept is too short": embeds_messages(0, EMBEDS, KEPT[:-1]),
    "nothing says what is kept": embeds_messages(0, EMBEDS, None),
    "NaN": embeds_with(float("nan")),
    "infinity": embeds_with(float("inf")),
    "too narrow": embeds_messages(0, EMBEDS[..., 1:], KEPT),
    "too few rows": embeds_messages(0, EMBEDS[:, 1:], KEPT),
    "integers": embeds_of_another_type(),
    "another item": embeds_messages(1, EMBEDS, KEPT),
}


def plan_for(checkpoint: Path) -> PromptPlan:
    return prompt_plan(Checkpoint(checkpoint).fingerprint, TEXT_BEFORE, VIDEO, TEXT_AFTER)


def plan_message(plan: PromptPlan, number: int = 0) -> prompt_pb2.PromptPlan:
    """number: of the video, so that no answer is remembered for it."""
    (message,) = plan_messages(plan)
    for item in message.media:
        item.content_hash = number.to_bytes(32)
    return message


class Peer:
    """Says to every call what it is told to say."""

    def __init__(self) -> None:
        self.says: list[bytes] = []

    async def speak(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        await context.read()
        for each in self.says:
            yield each


@asynccontextmanager
async def behind_an_encoder(folder: Path, checkpoint: Path) -> AsyncIterator[tuple[Service, Peer]]:
    address, peer = f"unix:{folder}/peer", Peer()
    async with (
        speaking(address, "/framesieve.v1.EncoderService/Encode", peer.speak),
        open_channel(address) as channel,
        service_of(folder, checkpoint, encoder_channel=channel) as service,
    ):
        yield service, peer
        await eventually(service.idle)


async def check_told(lie: str, call: Any) -> None:
    code, reason, _ = await refused(call)
    assert (lie, code, reason) == (lie, grpc.StatusCode.INTERNAL, "PEER_CONTRACT")


async def check_answered(call: Any) -> None:
    assert len(token_ids(await answers(call))) == 5


async def test_metadata_of_a_lying_encoder_breaks_the_contract(tmp_path: Path, tiny_checkpoint: Path) -> None:
    plan = plan_for(tiny_checkpoint)

    def lying_runs(runs: list[tuple[int, int]]) -> Callable[[prompt_pb2.PromptPlan], None]:
        def lie(message: prompt_pb2.PromptPlan) -> None:
            del message.media[0].runs[:]
            message.media[0].runs.extend(prompt_pb2.Run(offset=offset, length=length) for offset, length in runs)

        return lie

    lies = {lie.__name__: lie for lie in LIES} | {name: lying_runs(runs) for name, runs in LYING_RUNS.items()}
    async with behind_an_encoder(tmp_path, tiny_checkpoint) as (service, peer):
        for number, (name, lie) in enumerate(lies.items()):
            message = plan_message(plan)
            lie(message)
            peer.says = [EncodeResponse(plan=message).SerializeToString()]
            # An answer that cannot fit, so that what would is looked for.
            await check_told(name, service.ask(sampling=Sampling(max_new_tokens=10_000)))
            truth = [EncodeResponse(plan=plan_message(plan, number)), *video_items()]
            peer.says = [each.SerializeToString() for each in truth]
            await check_answered(service.ask())


async def test_embeddings_of_a_lying_encoder_break_the_contract(tmp_path: Path, tiny_checkpoint: Path) -> None:
    plan = plan_for(tiny_checkpoint)
    async with behind_an_encoder(tmp_path, tiny_checkpoint) as (service, peer):
        for number, (name, items) in enumerate(LYING_ITEMS.items()):
            first = EncodeResponse(plan=plan_message(plan, number))
            peer.says = [each.SerializeToString() for each in [first, *items]]
            await check_told(name, service.ask())
            peer.says = [each.SerializeToString() for each in [first, *video_items()]]
            await check_answered(service.ask())


async def test_what_lying_preprocessing_makes_of_a_text_breaks_the_contract(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    address, peer = f"unix:{tmp_path}/peer", Peer()
    async with (
        speaking(address, "/framesieve.v1.PreprocessingService/Preprocess", peer.speak),
        open_channel(address) as channel,
        service_of(tmp_path, tiny_checkpoint, preprocessing_channel=channel) as service,
    ):
        truth = PreprocessResponse(plan=plan_message(service.preprocessing.plan)).SerializeToString()
        frames = PreprocessResponse(frames=FramesChunk()).SerializeToString()
        lies = {"nothing at all": [], "an empty message": [b""], "frames before the plan": [frames, truth]}
        for lie in LIES_ABOUT_ANY_PROMPT:
            message = plan_message(service.preprocessing.plan)
            lie(message)
            lies[lie.__name__] = [PreprocessResponse(plan=message).SerializeToString()]
        for name, said in lies.items():
            peer.says = said
            await check_told(name, service.ask_text())
            peer.says = [truth]
            await check_answered(service.ask_text())
        await eventually(service.idle)
