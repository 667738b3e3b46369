"""Generation behind peers that lie in a single field: each lie ends the request with PEER_CONTRACT.

The peers send raw bytes, because our own classes refuse such values.
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


def with_token(plan: prompt_pb2.PromptPlan, token: int) -> None:
    """Changes the first token."""
    plan.layout.data = np.int32(token).tobytes() + plan.layout.data[4:]


def with_unasked_medium(plan: prompt_pb2.PromptPlan) -> None:
    (sent,) = plan_messages(prompt_plan(bytes(32), 1, VIDEO))
    plan.media.extend(sent.media)


def with_frames_of_one_pixel(plan: prompt_pb2.PromptPlan) -> None:
    """Smaller than their grid. The text of the error would compute what fits."""
    plan.media[0].frame_height_px = plan.media[0].frame_width_px = 1


def with_overlapping_runs(plan: prompt_pb2.PromptPlan) -> None:
    """The 24 tokens of the video are at 7 of 36."""
    del plan.media[0].runs[:]
    plan.media[0].runs.extend(prompt_pb2.Run(offset=offset, length=length) for offset, length in [(7, 16), (15, 8)])


# Plans that contradict themselves are in test_wire.py; two of them here show that generation uses those checks.
LIES_ABOUT_ANY_PROMPT: dict[str, Callable[[prompt_pb2.PromptPlan], Any]] = {
    "a token outside the vocabulary": lambda plan: with_token(plan, 2**31 - 1),
    "a negative token": lambda plan: with_token(plan, -1),
    "a medium that was not in the prompt": with_unasked_medium,
    "another checkpoint": lambda plan: setattr(plan, "fingerprint", bytes(32)),
    "embed levels of another family": lambda plan: setattr(plan, "embed_levels", 3),
    "a million axes": lambda plan: plan.layout.shape.extend([1] * 10**6),
}
LIES = {
    **LIES_ABOUT_ANY_PROMPT,
    "frames of one pixel": with_frames_of_one_pixel,
    "overlapping runs": with_overlapping_runs,
    "no runs": lambda plan: plan.media[0].ClearField("runs"),
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
    "no kept": embeds_messages(0, EMBEDS, None),
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
    """number: of the video, so that nothing of it is cached yet."""
    (message,) = plan_messages(plan)
    for item in message.media:
        item.content_hash = number.to_bytes(32)
    return message


class Peer:
    """Answers every call with `says`."""

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


async def check_refused(lie: str, call: Any) -> None:
    code, reason, _ = await refused(call)
    assert (lie, code, reason) == (lie, grpc.StatusCode.INTERNAL, "PEER_CONTRACT")


async def check_answered(call: Any) -> None:
    assert len(token_ids(await answers(call))) == 5


async def test_a_false_plan_of_an_encoder_breaks_the_contract(tmp_path: Path, tiny_checkpoint: Path) -> None:
    plan = plan_for(tiny_checkpoint)
    async with behind_an_encoder(tmp_path, tiny_checkpoint) as (service, peer):
        for number, (name, lie) in enumerate(LIES.items()):
            message = plan_message(plan)
            lie(message)
            peer.says = [EncodeResponse(plan=message).SerializeToString()]
            # So many tokens that the error about it would compute what fits.
            await check_refused(name, service.ask(sampling=Sampling(max_new_tokens=10_000)))
            truth = [EncodeResponse(plan=plan_message(plan, number)), *video_items()]
            peer.says = [each.SerializeToString() for each in truth]
            await check_answered(service.ask())


async def test_false_embeddings_of_an_encoder_break_the_contract(tmp_path: Path, tiny_checkpoint: Path) -> None:
    plan = plan_for(tiny_checkpoint)
    async with behind_an_encoder(tmp_path, tiny_checkpoint) as (service, peer):
        for number, (name, items) in enumerate(LYING_ITEMS.items()):
            first = EncodeResponse(plan=plan_message(plan, number))
            peer.says = [each.SerializeToString() for each in [first, *items]]
            await check_refused(name, service.ask())
            peer.says = [each.SerializeToString() for each in [first, *video_items()]]
            await check_answered(service.ask())


async def test_a_false_plan_of_preprocessing_breaks_the_contract(tmp_path: Path, tiny_checkpoint: Path) -> None:
    address, peer = f"unix:{tmp_path}/peer", Peer()
    async with (
        speaking(address, "/framesieve.v1.PreprocessingService/Preprocess", peer.speak),
        open_channel(address) as channel,
        service_of(tmp_path, tiny_checkpoint, preprocessing_channel=channel) as service,
    ):
        truth = PreprocessResponse(plan=plan_message(service.preprocessing.plan)).SerializeToString()
        frames = PreprocessResponse(frames=FramesChunk()).SerializeToString()
        lies = {"nothing at all": [], "an empty message": [b""], "frames before the plan": [frames, truth]}
        for name, lie in LIES_ABOUT_ANY_PROMPT.items():
            message = plan_message(service.preprocessing.plan)
            lie(message)
            lies[name] = [PreprocessResponse(plan=message).SerializeToString()]
        for name, said in lies.items():
            peer.says = said
            await check_refused(name, service.ask_text())
            peer.says = [truth]
            await check_answered(service.ask_text())
        await eventually(service.idle)
