"""The encoder when preprocessing breaks the contract, refuses, fails or is gone: the error that the caller gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.contract import errors
from common.contract.plan import PromptPlan
from common.contract.tensors import DType
from framesieve.v1 import prompt_pb2
from framesieve.v1.preprocessing_pb2 import FramesChunk, PreprocessResponse
from services.encoder.tower.patches import PatchShape
from tests.common.loopback import TIMEOUT_S
from tests.encoder.encoder_peers import IMAGE, VIDEO, frames_of, other_item, plan_of, slice_messages
from tests.encoder.encoder_service import SELECT_ALL, Stack, check_served, encode, first_request, read_all, select
from tests.families import FAMILIES

QWEN3_VL = FAMILIES["qwen3_vl"]
PATCHES = PatchShape(QWEN3_VL.patch_px, QWEN3_VL.merge, QWEN3_VL.temporal_patch)

BENT_PLANS: dict[str, Callable[[PromptPlan], PromptPlan]] = {
    "another checkpoint": lambda plan: replace(plan, fingerprint=bytes(32)),
    "more levels": lambda plan: replace(plan, embed_levels=plan.embed_levels + 1),
    "no media": lambda plan: replace(plan, media=()),
    "an image": lambda plan: replace(plan, media=plan_of([IMAGE], PATCHES, 0).media),
    "half a patch higher": lambda plan: other_item(plan, frame_height_px=2 * PATCHES.token_px + 7),
    "a token narrower": lambda plan: other_item(plan, frame_width_px=2 * PATCHES.token_px),
    "frames missing": lambda plan: other_item(plan, frames=6),
    "frames beyond": lambda plan: other_item(plan, frames=9),
    "embeddings not brought": lambda plan: other_item(plan, frames=0, frame_height_px=0, frame_width_px=0),
}


@pytest.mark.parametrize("bend", BENT_PLANS.values(), ids=BENT_PLANS.keys())
async def test_a_plan_that_does_not_fit_the_prompt_breaks_the_contract(
    stack: Stack, bend: Callable[[PromptPlan], PromptPlan]
) -> None:
    stack.preprocessing.bend_plan = bend
    with pytest.raises(errors.PeerContract):
        await encode(stack, first_request([VIDEO]), SELECT_ALL)
    assert stack.preprocessing.selected == []
    await check_served(stack)


FRAMES = frames_of(0, VIDEO, PATCHES)[:2]

Bend = Callable[[list[PreprocessResponse]], list[PreprocessResponse]]
BENT_FRAMES: dict[str, Bend] = {
    "none come": lambda messages: [],
    "an empty piece": lambda messages: [PreprocessResponse(frames=FramesChunk(media_index=0))],
    "a slice is short of bytes": lambda messages: messages[:3] + cut(messages[3]),
    "the last slice does not come": lambda messages: messages[:-1],
    "one slice too many": lambda messages: messages + slice_messages(0, 8, FRAMES),
    "another order": lambda messages: [messages[1], messages[0], *messages[2:]],
    "one slice twice": lambda messages: [messages[0], *messages],
    "another item's": lambda messages: [messages[0], *slice_messages(1, 2, FRAMES), *messages[2:]],
    "an item that was not selected": lambda messages: messages + slice_messages(1, 0, FRAMES),
    "another shape": lambda messages: slice_messages(0, 0, FRAMES[:, 1:].copy()),
    "one frame a slice": lambda messages: slice_messages(0, 0, FRAMES[:1]),
    "another dtype": lambda messages: slice_messages(0, 0, FRAMES, DType.INT32),
    "more repaired than there are": lambda messages: [repaired(messages[0], 3), *messages[1:]],
    "a second plan": lambda messages: [PreprocessResponse(plan=prompt_pb2.PromptPlan())],
    "an empty message": lambda messages: [PreprocessResponse()],
}


def cut(message: PreprocessResponse) -> list[PreprocessResponse]:
    message.frames.chunk.data = message.frames.chunk.data[:-1]
    return [message]


def repaired(message: PreprocessResponse, frames: int) -> PreprocessResponse:
    message.frames.repaired_frames = frames
    return message


@pytest.mark.parametrize("bend", BENT_FRAMES.values(), ids=BENT_FRAMES.keys())
async def test_frames_that_the_plan_did_not_announce_break_the_contract(stack: Stack, bend: Bend) -> None:
    stack.preprocessing.bend_frames = bend
    with pytest.raises(errors.PeerContract, match=r"^a peer of Encode broke the contract, request id \w+$"):
        await encode(stack, first_request([VIDEO, VIDEO]), select(0))
    await check_served(stack)


@pytest.mark.parametrize(
    "error",
    [
        errors.MediaDamaged("9 of 10 frames cannot be decoded"),
        errors.MediaForbidden("path is outside --media-root"),
        errors.Overloaded("the queue is full", retry_after_s=3),
        errors.Unavailable("preprocessing is draining", "preprocessing"),
    ],
)
async def test_errors_of_preprocessing_reach_the_caller(stack: Stack, error: errors.FramesieveError) -> None:
    stack.preprocessing.fail = error
    with pytest.raises(type(error), match=str(error)):
        await encode(stack, first_request([VIDEO]), SELECT_ALL)
    await check_served(stack)


async def test_an_internal_error_of_preprocessing_reaches_the_caller_without_its_text(stack: Stack) -> None:
    stack.preprocessing.fail = ZeroDivisionError("secret")
    with pytest.raises(errors.FramesieveError, match="an internal error in Preprocess") as raised:
        await encode(stack, first_request([VIDEO]), SELECT_ALL)
    assert "secret" not in str(raised.value)
    await check_served(stack)


async def test_a_caller_that_has_not_finished_selecting_gets_the_error(stack: Stack) -> None:
    stack.preprocessing.fail = errors.MediaDamaged("9 of 10 frames cannot be decoded")
    call = stack.stub.Encode(timeout=TIMEOUT_S)
    await call.write(first_request([VIDEO, VIDEO]))
    await call.write(select(0))
    with pytest.raises(errors.MediaDamaged, match="9 of 10"):
        await read_all(call)
    await check_served(stack)
