"""Generation when the encoder breaks the contract: what does not fit breaks off, and its room is free again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.contract import errors
from common.contract.plan import Grid, Modality, PromptPlan
from framesieve.v1 import prompt_pb2, tensor_pb2
from framesieve.v1.encoder_pb2 import EncodeResponse
from services.generation.rpc.timing import StageClock
from tests.generation.generation_peers import Encoder, embeds_messages, progress_message, prompt_message, prompt_plan
from tests.generation.media_client import (
    FINGERPRINT,
    IMAGE,
    IMAGE_EMBEDS,
    KEPT,
    MODEL,
    PLAN,
    PRUNING,
    VIDEO,
    VIDEO_EMBEDS,
    ask,
    client_of,
    items,
)

TURNED = prompt_plan(FINGERPRINT, 3, (Modality.VIDEO, Grid(2, 3, 2)), 2, IMAGE, 2)


def brought(plan: PromptPlan, *indices: int) -> PromptPlan:
    """The same plan, if the embeddings of these items came with the prompt."""
    media = list(plan.media)
    for index in indices:
        media[index] = replace(media[index], frames=0, frame_height_px=0, frame_width_px=0, timestamps_s=())
    return replace(plan, media=tuple(media))


async def test_embeddings_that_came_with_the_prompt_have_no_frames_to_repair(tmp_path: Path) -> None:
    messages = embeds_messages(0, VIDEO_EMBEDS, KEPT, repaired=1) + embeds_messages(1, IMAGE_EMBEDS, None)
    plan = brought(PLAN, 0, 1)
    async with client_of(tmp_path, Encoder(plan, messages)) as (client, _):
        with pytest.raises(errors.PeerContract, match="1 of 0 frames cannot be repaired"):
            await ask(client, plan)


# Changes to the messages of `items`, of which 2, 3, 4 are the video's and 6, 7 the image's.
Change = Callable[[list[EncodeResponse]], Any]


def kept_of(*kept: int) -> Change:
    def change(messages: list[EncodeResponse]) -> None:
        [changed, *_] = embeds_messages(0, VIDEO_EMBEDS, kept, piece_bytes=64)
        messages[2] = changed

    return change


def kept_of_the_image(messages: list[EncodeResponse]) -> None:
    messages[6] = embeds_messages(1, IMAGE_EMBEDS, range(4), piece_bytes=64)[0]


def embeds_of(embeds: np.ndarray[Any, np.dtype[np.float32]]) -> Change:
    def change(messages: list[EncodeResponse]) -> None:
        messages[2:5] = embeds_messages(0, embeds, KEPT, piece_bytes=64)

    return change


def with_value(value: float) -> Change:
    embeds = VIDEO_EMBEDS.copy()
    embeds[0, 5, 5] = value
    return embeds_of(embeds)


def field(place: int, path: str, value: Any) -> Change:
    def change(messages: list[EncodeResponse]) -> None:
        *parents, name = path.split(".")
        target: Any = messages[place]
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)

    return change


FAULTS: dict[str, tuple[Change, str]] = {
    "kept falls": (kept_of(0, 1, 3, 2, 7, 11), "increase strictly"),
    "kept repeats": (kept_of(0, 1, 2, 2, 7, 11), "increase strictly"),
    "kept below 0": (kept_of(-1, 1, 2, 3, 7, 11), "increase strictly"),
    "kept outside the grid": (kept_of(0, 1, 2, 3, 7, 12), "below 12"),
    "kept too few": (kept_of(0, 1, 2, 3, 7), "must keep 6"),
    "kept absent": (lambda m: m[2].embeds.ClearField("kept"), "nowhere else"),
    "kept of an image, of which all are": (kept_of_the_image, "nowhere else"),
    "kept of hundreds of axes": (lambda m: m[2].embeds.kept.shape.extend([1] * 200), "201 axes"),
    "a piece of hundreds of axes": (lambda m: m[2].embeds.chunk.shape.extend([2**62] * 200), "203 axes"),
    "a piece of hundreds of axes halfway": (lambda m: m[3].embeds.chunk.shape.extend([1] * 200), "203 axes"),
    "kept of more than there is": (lambda m: m[2].embeds.kept.shape.extend([2**62, 2**62]), "not allowed"),
    "kept of fewer than none": (lambda m: m[2].embeds.kept.shape.extend([-1]), "not allowed"),
    "kept of another size": (field(2, "embeds.kept.data", b"1234"), "expected int32"),
    "kept of another type": (field(2, "embeds.kept.dtype", tensor_pb2.DTYPE_INT64), "expected int32"),
    "kept twice": (lambda m: m[3].embeds.kept.CopyFrom(m[2].embeds.kept), "later piece"),
    "NaN": (with_value(float("nan")), "not finite"),
    "infinity": (with_value(float("inf")), "not finite"),
    "too narrow": (embeds_of(np.zeros((1, 6, 5), np.float32)), r"expected .* \[1, 6, 6\]"),
    "too few rows": (embeds_of(np.zeros((1, 5, 6), np.float32)), r"expected .* \[1, 6, 6\]"),
    "a level too many": (embeds_of(np.zeros((2, 6, 6), np.float32)), r"expected .* \[1, 6, 6\]"),
    "integers": (field(2, "embeds.chunk.dtype", tensor_pb2.DTYPE_INT32), "expected bfloat16"),
    "no dtype": (field(2, "embeds.chunk.dtype", 77), "dtype 77"),
    "a gap": (lambda m: m.pop(3), "starts at byte 128"),
    "a piece twice": (lambda m: m.insert(3, m[2]), "starts at byte 0|later piece"),
    "another shape halfway": (lambda m: m[3].embeds.chunk.shape.append(1), "was sent for an array"),
    "another dtype halfway": (field(3, "embeds.chunk.dtype", tensor_pb2.DTYPE_FLOAT16), "was sent for an array"),
    "too long": (field(4, "embeds.chunk.data", b"1" * 17), "does not fit"),
    "an empty piece": (field(3, "embeds.chunk.data", b""), "does not fit"),
    "an item that does not exist": (field(2, "embeds.media_index", 2), "item 2, "),
    "an item below 0": (field(2, "embeds.media_index", -1), "item -1, "),
    "an item twice": (lambda m: m.insert(5, m[2]), "sent twice"),
    "an early end": (lambda m: m.pop(), "ended before"),
    "nothing at all": (lambda m: m.clear(), "ended before"),
    "an empty message": (lambda m: m.insert(0, EncodeResponse()), "None where"),
    "a second plan": (lambda m: m.insert(0, EncodeResponse(plan=prompt_pb2.PromptPlan())), "plan where"),
    "progress that says nothing": (lambda m: m.insert(0, progress_message(0, 0, 0)), "to 0 and 0"),
    "progress that says nothing new": (lambda m: m.insert(1, m[0]), "to 1 and 0"),
    "progress that falls": (lambda m: m.insert(2, progress_message(0, 1, 0)), "from 2 decoded"),
    "more slices than there are": (field(1, "progress.decoded_slices", 3), "to 3"),
    "encoded before decoded": (field(0, "progress.encoded_slices", 2), "1 and 2"),
    "progress of no item": (field(0, "progress.media_index", 5), "item 5, "),
    "more repairs than frames": (field(2, "embeds.repaired_frames", 5), "5 of 4 frames"),
    "repairs below 0": (field(2, "embeds.repaired_frames", -1), "-1 of 4 frames"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_does_not_fit_the_plan_breaks_off_and_frees_the_room(tmp_path: Path, fault: str) -> None:
    change, message = FAULTS[fault]
    messages = items()
    change(messages)
    async with client_of(tmp_path, Encoder(PLAN, messages)) as (client, room):
        with pytest.raises(errors.PeerContract, match=message):
            await ask(client)
        assert room.held_bytes == 0


async def test_an_item_that_was_not_selected_breaks_off(tmp_path: Path) -> None:
    async with client_of(tmp_path, Encoder(PLAN, items()[2:])) as (client, room):
        clock = StageClock()
        async with client.open(prompt_message(PLAN), PRUNING, clock) as session:
            with pytest.raises(errors.PeerContract, match=r"sent item 0, \[1\] are selected"):
                _ = [each async for each in session.receive([1], clock)]
        assert room.held_bytes == 0


async def test_embeddings_too_large_for_the_models_dtype_are_not_taken_for_finite(tmp_path: Path) -> None:
    messages = items()
    with_value(1e6)(messages)
    model = replace(MODEL, dtype=torch.float16)
    async with client_of(tmp_path, Encoder(PLAN, messages), model=model) as (client, _):
        with pytest.raises(errors.PeerContract, match=r"not finite in torch\.float16"):
            await ask(client)


PLANS: dict[str, tuple[PromptPlan, str]] = {
    "another checkpoint's": (prompt_plan(bytes(32), 3, VIDEO, 2, IMAGE, 2), "the same --model"),
    "media in another order": (prompt_plan(FINGERPRINT, 3, IMAGE, 2, VIDEO, 2), "the prompt's media are"),
    "media missing": (prompt_plan(FINGERPRINT, 3, VIDEO, 2), "the prompt's media are"),
}


@pytest.mark.parametrize("fault", PLANS)
async def test_a_plan_that_does_not_fit_prompt_and_model_breaks_off(tmp_path: Path, fault: str) -> None:
    plan, message = PLANS[fault]
    async with client_of(tmp_path, Encoder(plan)) as (client, _):
        with pytest.raises(errors.PeerContract, match=message):
            async with client.open(prompt_message(PLAN), PRUNING, StageClock()):
                pass


@pytest.mark.parametrize(
    ("asked", "planned", "message"),
    [
        (PLAN, brought(PLAN, 1), r"parts\[2\].image brings its path, the plan has 0 frames"),
        (brought(PLAN, 0), PLAN, r"parts\[1\].video brings its embeds, the plan has 4 frames"),
        (brought(PLAN, 0), brought(TURNED, 0), r"parts\[1\].video brings embeddings of another grid than .* 2×3×2"),
    ],
)
async def test_a_plan_of_other_embeddings_than_the_prompts_breaks_off(
    tmp_path: Path, asked: PromptPlan, planned: PromptPlan, message: str
) -> None:
    async with client_of(tmp_path, Encoder(planned, items())) as (client, _):
        with pytest.raises(errors.PeerContract, match=message):
            async with client.open(prompt_message(asked), PRUNING, StageClock()):
                pass


@pytest.mark.parametrize(
    ("model", "message"), [((13, 0), "token 22, the model knows 13"), ((100, 1), "0 embed_levels")]
)
async def test_a_plan_beyond_the_model_breaks_off(tmp_path: Path, model: tuple[int, int], message: str) -> None:
    smaller = replace(MODEL, vocab_size=model[0], embed_levels=model[1])
    async with client_of(tmp_path, Encoder(PLAN), model=smaller) as (client, _):
        with pytest.raises(errors.PeerContract, match=message):
            await ask(client)
