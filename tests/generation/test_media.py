"""The encoder's client against real gRPC servers: what it delivers, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gridsieve.common.contract import errors
from gridsieve.common.contract.plan import FrameShape, Grid, Modality, PromptPlan
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.common.contract.wire import int32_tensor
from gridsieve.common.sealed_memory import SealedMemory
from gridsieve.services.generation.request.encoded_media import MediaItem
from gridsieve.services.generation.request.encoded_media_cache import encoded_media_key
from gridsieve.services.generation.stage_clock import StageClock
from gridsieve.services.generation.upstream.arriving_item import ArrivingItem, Progress
from gridsieve.v1 import prompt_pb2, tensor_pb2
from gridsieve.v1.encoder_pb2 import EncodeResponse
from tests.generation.generation_peers import (
    Encoder,
    embeds_messages,
    eventually,
    progress_message,
    prompt_message,
    prompt_plan,
)
from tests.generation.media_client import (
    FINGERPRINT,
    IMAGE,
    IMAGE_EMBEDS,
    KEPT,
    MODEL,
    PLAN,
    PRUNING,
    SIZE_BYTES,
    VIDEO,
    VIDEO_EMBEDS,
    ask,
    client_of,
    items,
    parted_items,
    receive_all,
)
from tests.sealed_memory import memory_of, unsealed


def test_media_encoded_otherwise_have_other_keys() -> None:
    video, _ = PLAN.media
    random = ItemPruning(rate=0.5, method="random", seed=1)
    differing = [
        (video, random, 6, FINGERPRINT),
        *(
            (video, replace(random, **other), 6, FINGERPRINT)
            for other in ({"seed": 2}, {"rate": 0.25}, {"method": "evs"})
        ),
        (replace(video, content_hash=bytes(range(32))), random, 6, FINGERPRINT),
        (replace(video, grid=TURNED.media[0].grid), random, 6, FINGERPRINT),
        (video, random, 6, bytes(32)),
        (video, random, 6, FINGERPRINT, bytes(32)),
    ]
    assert len({encoded_media_key(*each) for each in differing}) == len(differing)


async def test_items_arrive_in_the_models_dtype_and_the_session_holds_their_bytes(tmp_path: Path) -> None:
    encoder = Encoder(PLAN, items())
    model = replace(MODEL, dtype=torch.bfloat16)
    async with client_of(tmp_path, encoder, model=model) as (client, room):
        clock = StageClock()
        async with client.open(prompt_message(PLAN), PRUNING, clock) as session:
            assert (session.plan.media, session.num_kept, room.held_bytes) == (PLAN.media, (6, 4), 0)
            received = await receive_all(session)
            assert room.held_bytes == SIZE_BYTES // 2
        assert room.held_bytes == 0
    assert encoder.selections == [[0, 1]]
    progress = [each for each in received if isinstance(each, Progress)]
    assert progress == [Progress(0, 1, 0), Progress(0, 2, 1), Progress(1, 1, 1)]
    video, image = (each for each in received if isinstance(each, MediaItem))
    assert (video.media_index, video.repaired_frames, image.media_index, image.repaired_frames) == (0, 1, 1, 0)
    assert video.kept is not None
    assert (video.kept.tolist(), image.kept) == (KEPT, None)
    for item, sent in ((video, VIDEO_EMBEDS), (image, IMAGE_EMBEDS)):
        assert item.embeds.dtype == torch.bfloat16
        assert torch.equal(item.embeds, torch.from_numpy(sent).bfloat16())


@pytest.mark.parametrize(
    ("dtype", "wire_dtype"),
    [(torch.bfloat16, tensor_pb2.DTYPE_BFLOAT16), (torch.float16, tensor_pb2.DTYPE_FLOAT16)],
)
async def test_half_precision_is_converted_exactly_and_levels_count_as_bytes(
    tmp_path: Path, dtype: torch.dtype, wire_dtype: Any
) -> None:
    embeds = torch.linspace(-3, 3, 72).reshape(3, 4, 6).to(dtype)
    plan = replace(prompt_plan(FINGERPRINT, 1, IMAGE, 1), embed_levels=2)
    message = EncodeResponse()
    data = embeds.view(torch.int16).numpy().tobytes()
    message.embeds.chunk.CopyFrom(tensor_pb2.TensorChunk(dtype=wire_dtype, shape=embeds.shape, data=data))
    model, size_bytes = replace(MODEL, embed_levels=2), 3 * 4 * 6 * 4
    async with client_of(tmp_path, Encoder(plan, [message]), model=model, buffer_bytes=size_bytes) as (client, room):
        clock = StageClock()
        async with client.open(prompt_message(plan), PRUNING, clock) as session:
            [item] = await receive_all(session)
            assert room.held_bytes == size_bytes
    assert isinstance(item, MediaItem)
    assert torch.equal(item.embeds, embeds.float())


async def test_nothing_is_selected_before_all_its_bytes_are_reserved(tmp_path: Path) -> None:
    encoder = Encoder(PLAN, items())
    async with client_of(tmp_path, encoder) as (client, room):
        async with room.reserved(1):
            asking = asyncio.create_task(ask(client))
            await eventually(lambda: encoder.selections == [[]] and room.waiting == 1)
        assert len(await asking) == 5
        assert encoder.selections == [[0, 1]]
        assert room.held_bytes == 0


TURNED = prompt_plan(FINGERPRINT, 3, (Modality.VIDEO, Grid(2, 3, 2)), 2, IMAGE, 2)


def brought(plan: PromptPlan) -> PromptPlan:
    """The same plan if the prompt had brought the embeddings of its first item."""
    first = replace(plan.media[0], frames=FrameShape(), timestamps_s=())
    return replace(plan, media=(first, *plan.media[1:]))


# Changes to the messages of `items`: 2, 3 and 4 are the video's, 6 and 7 the image's.
Change = Callable[[list[EncodeResponse]], Any]


def kept_of(place: int, *kept: int) -> Change:
    return lambda messages: messages[place].embeds.kept.CopyFrom(int32_tensor(np.array(kept, np.int32)))


def embeds_of(embeds: np.ndarray[Any, np.dtype[np.float32]]) -> Change:
    return lambda messages: messages.__setitem__(slice(2, 5), embeds_messages(0, embeds, KEPT, piece_bytes=64))


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
    "kept decreases": (kept_of(2, 0, 1, 3, 2, 7, 11), "increase strictly"),
    "kept below 0": (kept_of(2, -1, 1, 2, 3, 7, 11), "increase strictly"),
    "kept outside the grid": (kept_of(2, 0, 1, 2, 3, 7, 12), "below 12"),
    "kept too few": (kept_of(2, 0, 1, 2, 3, 7), "must keep 6"),
    "kept absent": (lambda m: m[2].embeds.ClearField("kept"), "if and only if"),
    "kept of an image that is not pruned": (lambda m: m[6].embeds.kept.CopyFrom(m[2].embeds.kept), "if and only if"),
    "kept with an overflowing shape": (lambda m: m[2].embeds.kept.shape.extend([2**62, 2**62]), "not allowed"),
    "kept of another size": (field(2, "embeds.kept.data", b"1234"), "expected int32"),
    "kept twice": (lambda m: m[3].embeds.kept.CopyFrom(m[2].embeds.kept), "only the first piece"),
    "a level too many": (embeds_of(np.zeros((2, 6, 6), np.float32)), r"expected .* \[1, 6, 6\]"),
    "integers": (field(2, "embeds.chunk.dtype", tensor_pb2.DTYPE_INT32), "expected bfloat16"),
    "a gap": (lambda m: m.pop(3), "starts at byte 128"),
    "an item that does not exist": (field(2, "embeds.media_index", 2), "item 2, "),
    "an item twice": (lambda m: m.insert(5, m[2]), "sent twice"),
    "an early end": (lambda m: m.pop(), "ended before"),
    "a second plan": (lambda m: m.insert(0, EncodeResponse(plan=prompt_pb2.PromptPlan())), "sent plan, expected"),
    "progress that decreases": (lambda m: m.insert(2, progress_message(0, 1, 0)), "from 2 decoded"),
    "more slices than there are": (field(1, "progress.decoded_slices", 3), "to 3"),
    "encoded before decoded": (field(0, "progress.encoded_slices", 2), "1 and 2"),
    "progress of no item": (field(0, "progress.media_index", 5), "item 5, "),
    "shared memory that was not asked for": (field(2, "embeds.chunk.shared", True), "holds a whole array"),
    "pieces that go on in shared memory": (field(3, "embeds.chunk.shared", True), "goes on in shared memory"),
    "an encoding with a short name": (field(2, "embeds.encoding", b"short"), "encoding must have 32 bytes"),
    "a reference that was not asked for": (field(2, "embeds.reference", b"x"), "reference must have 0 bytes, got 1"),
    "more repairs than frames": (field(2, "embeds.repaired_frames", 5), "between 0 and 4, got 5"),
}


# Changes to the messages of `parted_items`: 0 and 1 are the video's first part, 2 and 3 its second.
PART_FAULTS: dict[str, tuple[Change, str]] = {
    "a part of no slices": (field(0, "embeds.slices", 0), "a part of 0 slices after 0 of 2"),
    "slices after which nothing is left": (field(0, "embeds.slices", 2), "a part of 2 slices"),
    "slices in a later piece": (field(1, "embeds.slices", 1), "only the first piece"),
    "a token of the next part": (kept_of(0, 0, 1, 2, 6), "from at least 0 to below 6"),
    "a token of the part before": (kept_of(2, 3, 7), "from at least 6 to below 12"),
    "a part whose tokens decrease": (kept_of(0, 0, 1, 3, 2), "increase strictly"),
    "a part that keeps nothing": (kept_of(0), "increase strictly"),
    "parts that keep too few": (kept_of(2, 7), "2 of 2 slices of item 0 keep 5 tokens"),
    "parts that keep too many": (lambda m: m[0].embeds.ClearField("kept"), r"expected .* \[1, 6, 6\]"),
    "another dtype": (field(2, "embeds.chunk.dtype", tensor_pb2.DTYPE_FLOAT16), "expected float32"),
    "a missing part": (lambda m: m.__delitem__(slice(2, 4)), "ended before"),
    "a part after the last": (lambda m: m.insert(4, m[2]), "sent twice"),
    "a part of an image": (field(4, "embeds.slices", 1), "a part of 1 slices after 0 of 1"),
}


async def test_parts_are_added_up_as_they_arrive(tmp_path: Path) -> None:
    async with client_of(tmp_path, Encoder(PLAN, parted_items())) as (client, _):
        first, whole, image = (each for each in await ask(client) if isinstance(each, MediaItem))
    assert (first.tokens, whole.tokens, image.tokens) == (6, None, None)
    assert first.kept is not None
    assert whole.kept is not None
    assert (first.kept.tolist(), whole.kept.tolist()) == (KEPT[:4], KEPT)
    assert torch.equal(first.embeds[:, :4], torch.from_numpy(VIDEO_EMBEDS[:, :4]))
    assert torch.equal(whole.embeds, torch.from_numpy(VIDEO_EMBEDS))
    assert first.digest == whole.digest != image.digest


@pytest.mark.parametrize(
    ("sent", "change", "message"),
    [
        *(pytest.param(items, *fault, id=name) for name, fault in FAULTS.items()),
        *(pytest.param(parted_items, *fault, id=name) for name, fault in PART_FAULTS.items()),
    ],
)
async def test_messages_that_contradict_the_plan_end_the_call_and_release_its_bytes(
    tmp_path: Path, sent: Callable[[], list[EncodeResponse]], change: Change, message: str
) -> None:
    messages = sent()
    change(messages)
    async with client_of(tmp_path, Encoder(PLAN, messages)) as (client, room):
        with pytest.raises(errors.PeerContract, match=message):
            await ask(client)
        assert room.held_bytes == 0


# Of 12 tokens at most 9.
BOUNDED = prompt_pb2.Pruning(rate=0.25, method="pixel_change", threshold=0.1)
UNLIMITED = prompt_pb2.Pruning(method="pixel_change", threshold=0.1)


def rows(count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(6 * count, dtype=np.float32).reshape(1, count, 6)


@pytest.mark.parametrize(
    ("pruning", "kept"), [(BOUNDED, [0, 2, 7]), (BOUNDED, [*range(6), 6, 7, 8]), (UNLIMITED, [4]), (UNLIMITED, None)]
)
async def test_a_threshold_may_keep_fewer_tokens_than_the_bound(
    tmp_path: Path, pruning: prompt_pb2.Pruning, kept: list[int] | None
) -> None:
    sent = rows(12 if kept is None else len(kept))
    messages = embeds_messages(0, sent, kept, piece_bytes=64) + embeds_messages(1, IMAGE_EMBEDS, None, piece_bytes=64)
    most = (9 if pruning.rate else 12) + 4
    async with client_of(tmp_path, Encoder(PLAN, messages), buffer_bytes=most * 6 * 4) as (client, room):
        video, _ = [each for each in await ask(client, pruning=pruning) if isinstance(each, MediaItem)]
        assert room.held_bytes == 0
    assert (None if video.kept is None else video.kept.tolist()) == kept
    assert video.embeds.tolist() == sent.tolist()


@pytest.mark.parametrize(
    ("pruning", "kept", "sent", "message"),
    [
        (BOUNDED, range(10), rows(10), "at most 9"),
        (BOUNDED, [], rows(1), "at most 9"),
        (BOUNDED, None, rows(12), "if and only if"),
        (BOUNDED, [0, 2, 7], rows(9), r"expected .* \[1, 3, 6\], got .* \[1, 9, 6\]"),
        (UNLIMITED, range(12), rows(12), "at most 11"),
    ],
)
async def test_tokens_that_exceed_the_bound_or_do_not_match_their_embeddings_are_a_violation(
    tmp_path: Path, pruning: prompt_pb2.Pruning, kept: Any, sent: Any, message: str
) -> None:
    messages = embeds_messages(0, sent, kept, piece_bytes=64)
    async with client_of(tmp_path, Encoder(PLAN, messages), buffer_bytes=16 * 6 * 4) as (client, room):
        with pytest.raises(errors.PeerContract, match=message):
            await ask(client, pruning=pruning)
        assert room.held_bytes == 0


async def test_an_item_that_was_not_selected_is_a_violation(tmp_path: Path) -> None:
    async with client_of(tmp_path, Encoder(PLAN, items()[2:])) as (client, _):
        clock = StageClock()
        async with client.open(prompt_message(PLAN), PRUNING, clock) as session:
            with pytest.raises(errors.PeerContract, match=r"sent item 0, selected are \[1\]"):
                _ = [each async for each in session.receive([1])]


async def test_embeddings_that_overflow_the_models_dtype_are_a_violation(tmp_path: Path) -> None:
    messages = items()
    with_value(1e6)(messages)
    model = replace(MODEL, dtype=torch.float16)
    async with client_of(tmp_path, Encoder(PLAN, messages), model=model) as (client, _):
        with pytest.raises(errors.PeerContract, match=r"not finite in torch\.float16"):
            await ask(client)


@pytest.mark.parametrize(
    ("asked", "planned", "model", "message"),
    [
        (PLAN, prompt_plan(bytes(32), 3, VIDEO, 2, IMAGE, 2), {}, "the same --model"),
        (PLAN, prompt_plan(FINGERPRINT, 3, IMAGE, 2), {}, "the prompt has 2 media, the plan 1"),
        (brought(PLAN), PLAN, {}, r"source of .*parts\[1\].video is embeds, the plan has 4 frames"),
        (brought(PLAN), brought(TURNED), {}, r"parts\[1\].video are not the video of the grid 2×3×2"),
        (PLAN, PLAN, {"vocab_size": 13}, "token id 22, the model's vocabulary has 13"),
        (PLAN, PLAN, {"embed_levels": 1}, "embed_levels 0, the model 1"),
    ],
)
async def test_a_plan_that_contradicts_prompt_or_model_is_a_violation(
    tmp_path: Path, asked: PromptPlan, planned: PromptPlan, model: dict[str, int], message: str
) -> None:
    async with client_of(tmp_path, Encoder(planned), model=replace(MODEL, **model)) as (client, _):
        with pytest.raises(errors.PeerContract, match=message):
            async with client.open(prompt_message(asked), PRUNING, StageClock()):
                pass


# --- shared memory, values that are not finite, and which items are the same ---------------------------------------


ITEMS = [*embeds_messages(0, VIDEO_EMBEDS, KEPT), *embeds_messages(1, IMAGE_EMBEDS, None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_items_handed_over_equal_those_in_messages(tmp_path: Path, dtype: torch.dtype) -> None:
    encoder = Encoder(PLAN, ITEMS, hand_over=memory_of)
    async with client_of(tmp_path, encoder, model=replace(MODEL, dtype=dtype)) as (client, room):
        received = [each for each in await ask(client) if isinstance(each, MediaItem)]
        assert room.held_bytes == 0
    assert [each.media_index for each in received] == [0, 1]
    assert received[0].kept is not None
    assert (received[0].kept.tolist(), received[1].kept) == (KEPT, None)
    for item, sent in zip(received, (VIDEO_EMBEDS, IMAGE_EMBEDS), strict=True):
        assert torch.equal(item.embeds, torch.from_numpy(sent).to(dtype))


@pytest.mark.parametrize(
    "make",
    [unsealed, lambda content: memory_of(content[1:]), lambda content: memory_of(content + b"!")],
    ids=["unsealed", "too small", "too large"],
)
async def test_memory_that_could_change_or_has_another_size_ends_the_call_and_releases_its_bytes(
    tmp_path: Path, make: Callable[[bytes], SealedMemory]
) -> None:
    async with client_of(tmp_path, Encoder(PLAN, ITEMS, hand_over=make)) as (client, room):
        with pytest.raises(errors.PeerContract, match="shared memory has"):
            await ask(client)
        assert room.held_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_value_that_is_not_finite_is_found_at_every_place(dtype: torch.dtype, value: float) -> None:
    """Whether in a vector of values that are compared at once, or after the last of these."""
    (image,) = prompt_plan(FINGERPRINT, 1, IMAGE, 1).media
    model = replace(MODEL, hidden_size=37, dtype=dtype)
    sent = np.random.default_rng(0).standard_normal((1, 4, 37)).astype(np.float32)
    for place in range(sent.size):
        wrong = sent.copy()
        wrong.flat[place] = value
        item = ArrivingItem(0, image, 4, model)
        for message in embeds_messages(0, wrong, None):
            item.take_piece(message.embeds, 0)
        with pytest.raises(errors.PeerContract, match="not finite"):
            item.finish()


def received(encoding: bytes, kept: list[int], embeds: np.ndarray) -> bytes:
    item = ArrivingItem(0, PLAN.media[0], len(kept), MODEL)
    for message in embeds_messages(0, embeds, kept):
        if message.embeds.HasField("kept"):
            message.embeds.encoding = encoding
        item.take_piece(message.embeds, 0)
    arrived = item.finish()
    assert arrived
    return arrived.digest


def test_items_have_the_same_rows_if_their_encoding_has_the_same_name() -> None:
    one, other = bytes(32), bytes(31) + b"1"
    assert received(one, KEPT, VIDEO_EMBEDS) == received(one, [*KEPT[:-1], 10], VIDEO_EMBEDS)
    assert received(one, KEPT, VIDEO_EMBEDS) != received(other, KEPT, VIDEO_EMBEDS)
    assert received(b"", KEPT, VIDEO_EMBEDS) != received(b"", KEPT, VIDEO_EMBEDS)
