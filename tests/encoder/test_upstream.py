"""The encoder when preprocessing breaks the contract; how its other errors reach callers is in test_sharing.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from gridsieve.common.contract import errors
from gridsieve.common.contract.plan import FrameShape, Grid, PromptPlan
from gridsieve.common.contract.tensors import DType
from gridsieve.services.encoder.tower.packing import TowerShape
from gridsieve.services.encoder.tower.patches import PatchShape
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.preprocessing_pb2 import PreprocessResponse
from tests.common.loopback import TIMEOUT_S
from tests.encoder.encoder_peers import GRID, VIDEO, brought, frames_of, other_item, repeating, slice_messages
from tests.encoder.encoder_service import SELECT_ALL, Stack, first_request, read_all, select
from tests.families import FAMILIES

QWEN3_VL = FAMILIES["qwen3_vl"]
PATCHES = PatchShape(QWEN3_VL.patch_px, TowerShape(QWEN3_VL.merge), QWEN3_VL.temporal_patch)
PX = PATCHES.token_px

BentPlan = Callable[[PromptPlan], PromptPlan]
BENT_PLANS: dict[str, BentPlan] = {
    "another checkpoint": lambda plan: replace(plan, fingerprint=bytes(32)),
    "more levels": lambda plan: replace(plan, embed_levels=plan.embed_levels + 1),
    "no media": lambda plan: replace(plan, media=()),
    "half a patch higher": lambda plan: other_frames(plan, size_px=(2 * PX + 7, 3 * PX)),
    "a token narrower": lambda plan: other_frames(plan, size_px=(2 * PX, 2 * PX)),
    "frames beyond": lambda plan: other_frames(plan, count=9),
    "frames of floats": lambda plan: other_frames(plan, dtype=DType.FLOAT32),
    "embeddings not brought": lambda plan: other_item(plan, frames=FrameShape()),
}
BENT_PLANS_OF_EMBEDS: dict[str, BentPlan] = {
    "another grid of as many tokens": lambda plan: other_item(plan, grid=Grid(2, 4, 3)),
    "frames to decode": lambda plan: other_frames(plan, count=8, size_px=(2 * PX, 3 * PX)),
}


def other_frames(plan: PromptPlan, **changes: Any) -> PromptPlan:
    return other_item(plan, frames=replace(plan.media[0].frames, **changes))


@pytest.mark.parametrize("name", [*BENT_PLANS, *BENT_PLANS_OF_EMBEDS])
async def test_a_plan_that_does_not_fit_the_prompt_breaks_the_contract(stack: Stack, name: str) -> None:
    stack.preprocessing.bend_plan = {**BENT_PLANS, **BENT_PLANS_OF_EMBEDS}[name]
    embeds = torch.zeros(1 + stack.tower.embed_levels, GRID.tokens, stack.tower.embed_dim)
    with pytest.raises(errors.PeerContract):
        await stack.encode(first_request([VIDEO if name in BENT_PLANS else brought(embeds)]), SELECT_ALL)
    assert stack.preprocessing.selected == []
    await stack.check_served()


FRAMES = frames_of(0, VIDEO, PATCHES)[:2]

BentFrames = Callable[[list[PreprocessResponse]], list[PreprocessResponse]]
BENT_FRAMES: dict[str, BentFrames] = {
    "none come": lambda messages: [],
    "a slice is short of bytes": lambda messages: messages[:3] + cut(messages[3]),
    "the last slice does not come": lambda messages: messages[:-1],
    "one slice too many": lambda messages: messages + slice_messages(0, 8, FRAMES),
    "another order": lambda messages: [messages[1], messages[0], *messages[2:]],
    "another item's": lambda messages: [messages[0], *slice_messages(1, 2, FRAMES), *messages[2:]],
    "another shape": lambda messages: slice_messages(0, 0, FRAMES[:, 1:].copy()),
    "another dtype": lambda messages: slice_messages(0, 0, FRAMES, DType.INT32),
    "more repaired than there are": lambda messages: [repaired(messages[0], 3), *messages[1:]],
    "the first slice repeats one": lambda messages: [repeating(0, 0, 0), *messages[1:]],
    "a slice repeats itself": lambda messages: [messages[0], repeating(0, 2, 2), *messages[2:]],
    "a slice repeats one before the first": lambda messages: [messages[0], repeating(0, 2, -2), *messages[2:]],
    "a slice repeats half of two": lambda messages: [*messages[:2], repeating(0, 4, 1), *messages[3:]],
    "a slice that repeats another comes, too": lambda messages: [messages[0], too(messages[1]), *messages[2:]],
    "a slice that repeats another has a digest": lambda messages: [messages[0], repeating(0, 2, 0, digest=bytes(32))],
    "a short digest": lambda messages: [misnamed(messages[0]), *messages[1:]],
    "a second plan": lambda messages: [PreprocessResponse(plan=prompt_pb2.PromptPlan())],
}


def cut(message: PreprocessResponse) -> list[PreprocessResponse]:
    message.frames.chunk.data = message.frames.chunk.data[:-1]
    return [message]


def too(message: PreprocessResponse) -> PreprocessResponse:
    message.frames.repeats_frame = 0
    message.frames.digest = b""
    return message


def misnamed(message: PreprocessResponse) -> PreprocessResponse:
    message.frames.digest = bytes(31)
    return message


def repaired(message: PreprocessResponse, frames: int) -> PreprocessResponse:
    message.frames.repaired_frames = frames
    return message


@pytest.mark.parametrize("bend", BENT_FRAMES.values(), ids=BENT_FRAMES.keys())
async def test_frames_that_the_plan_did_not_announce_break_the_contract(stack: Stack, bend: BentFrames) -> None:
    stack.preprocessing.bend_frames = bend
    with pytest.raises(errors.PeerContract, match=r"^a peer of Encode broke the contract, request id \w+$"):
        await stack.encode(first_request([VIDEO, VIDEO]), select(0))
    await stack.check_served()


async def test_a_caller_that_has_not_finished_selecting_gets_the_error(stack: Stack) -> None:
    stack.preprocessing.fail = errors.MediaDamaged("9 of 10 frames cannot be decoded")
    call = stack.stub.Encode(timeout=TIMEOUT_S)
    await call.write(first_request([VIDEO, VIDEO]))
    await call.write(select(0))
    with pytest.raises(errors.MediaDamaged, match="9 of 10"):
        await read_all(call)
    await stack.check_served()
