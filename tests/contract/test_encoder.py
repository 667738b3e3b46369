"""The encoder over a real socket, between a caller and a preprocessing service that keeps the contract or breaks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common import errors
from common.channels import error_from_status, open_channel
from common.checkpoint import Checkpoint
from common.interceptors import RequestInterceptor
from common.plan import Grid, MediaPlan, Modality, PromptPlan, Run
from common.retention import Pruning
from common.room import Room
from common.tensors import DType
from common.wire import int32_array, media_parts, plan_messages, tensor_chunks
from demo.checkpoint import TINY
from framesieve.v1 import encoder_pb2_grpc, preprocessing_pb2_grpc, prompt_pb2
from framesieve.v1.encoder_pb2 import EncodePrompt, EncodeRequest, EncodeResponse
from framesieve.v1.preprocessing_pb2 import FramesChunk, PreprocessRequest, PreprocessResponse
from services.encoder.batcher import Batcher
from services.encoder.families import load_tower
from services.encoder.pruning import keep_tokens
from services.encoder.servicer import EncoderServicer
from services.encoder.tower import Tower

TOKEN_PX = TINY.patch_px * TINY.merge
GRID = Grid(4, 2, 3)
ITEM_BYTES = GRID.tokens * TINY.hidden * 4
TIMEOUT_S = 60

Media = tuple[Modality, Grid]
VIDEO: Media = (Modality.VIDEO, GRID)
IMAGE: Media = (Modality.IMAGE, Grid(1, 3, 2))


# --- a preprocessing service that does as it is told ------------------------------------------------------------


def frames_of(media_index: int, grid: Grid, count: int) -> NDArray[np.uint8]:
    shape = (count, grid.h * TOKEN_PX, grid.w * TOKEN_PX, 3)
    return np.random.default_rng(media_index).integers(0, 256, shape, dtype=np.uint8)


def frame_count(media: Media) -> int:
    return 1 if media[0] is Modality.IMAGE else media[1].t * TINY.temporal_patch


def plan_of(media: Sequence[Media], fingerprint: bytes) -> PromptPlan:
    items, offset = [], 1
    for modality, grid in media:
        video = modality is Modality.VIDEO
        item = MediaPlan(
            modality=modality,
            grid=grid,
            runs=(Run(offset, grid.tokens),),
            frames=frame_count((modality, grid)),
            frame_height_px=grid.h * TOKEN_PX,
            frame_width_px=grid.w * TOKEN_PX,
            seconds_per_grid=Fraction(1) if video else None,
            timestamps_s=(),
            content_hash=bytes(32),
        )
        items.append(item)
        offset += grid.tokens + 1
    positions = np.tile(np.arange(offset, dtype=np.int32), (3, 1))
    return PromptPlan(np.ones(offset, np.int32), positions, tuple(items), 0, fingerprint)


def slice_messages(
    media_index: int, first_frame: int, frames: NDArray[np.uint8], dtype: DType = DType.UINT8
) -> list[PreprocessResponse]:
    chunks = tensor_chunks(dtype, frames.shape, frames.data)
    return [
        PreprocessResponse(frames=FramesChunk(media_index=media_index, first_frame=first_frame, chunk=chunk))
        for chunk in chunks
    ]


def item_messages(media_index: int, media: Media) -> list[PreprocessResponse]:
    frames = frames_of(media_index, media[1], frame_count(media))
    step = TINY.temporal_patch
    starts = range(0, len(frames), step)
    return [message for start in starts for message in slice_messages(media_index, start, frames[start : start + step])]


@dataclass
class FakePreprocessing(preprocessing_pb2_grpc.PreprocessingServiceServicer):
    """Keeps the contract, save where a test bends the plan, the frames or the end."""

    fingerprint: bytes
    bend_plan: Callable[[PromptPlan], PromptPlan] = lambda plan: plan
    bend_frames: Callable[[list[PreprocessResponse]], list[PreprocessResponse]] = lambda messages: messages
    fail: Exception | None = None
    stall: bool = False
    on_select: Callable[[], None] = lambda: None
    selected: list[int] = field(default_factory=list)
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def Preprocess(
        self, requests: AsyncIterator[PreprocessRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[PreprocessResponse]:
        first = await anext(requests)
        media = [media_of(part) for part in media_parts(first.prompt)]
        for plan in plan_messages(self.bend_plan(plan_of(media, self.fingerprint))):
            yield PreprocessResponse(plan=plan)
        async for request in requests:
            index = request.select.media_index
            self.selected.append(index)
            self.on_select()
            messages = self.bend_frames(item_messages(index, media[index]))
            for message in messages[:1]:
                yield message
            if self.fail:
                raise self.fail
            if self.stall:
                await self._stall()
            for message in messages[1:]:
                yield message

    async def _stall(self) -> None:
        self.stalled.set()
        try:
            await asyncio.sleep(TIMEOUT_S)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


# --- both services, and a caller --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stack:
    stub: Any
    preprocessing: FakePreprocessing
    tower: Tower
    room: Room
    batcher: Batcher


@pytest.fixture(scope="module")
def tower(tiny_checkpoint: Path) -> Tower:
    torch.set_num_threads(1)
    return load_tower(Checkpoint(tiny_checkpoint), "auto", torch.device("cpu"))


@asynccontextmanager
async def serving(servicer: Any, add: Callable[[Any, grpc.aio.Server], None], address: str) -> AsyncIterator[Any]:
    server = grpc.aio.server(interceptors=[RequestInterceptor()])
    add(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        async with open_channel(address) as channel:
            yield channel
    finally:
        await server.stop(0)


@asynccontextmanager
async def running(folder: Path, tower: Tower, room_bytes: int = 2**24) -> AsyncIterator[Stack]:
    fingerprint = b"f" * 32
    fake, room, batcher = FakePreprocessing(fingerprint), Room(room_bytes), Batcher(tower.encode, budget_tokens=64)
    add_fake = preprocessing_pb2_grpc.add_PreprocessingServiceServicer_to_server
    add = encoder_pb2_grpc.add_EncoderServiceServicer_to_server
    try:
        async with serving(fake, add_fake, f"unix:{folder}/p") as upstream:
            servicer = EncoderServicer(tower, fingerprint, batcher, room, upstream)
            async with serving(servicer, add, f"unix:{folder}/e") as channel:
                stub = encoder_pb2_grpc.EncoderServiceStub(channel)
                yield Stack(stub, fake, tower, room, batcher)
    finally:
        batcher.close()


@pytest.fixture
async def stack(tmp_path: Path, tower: Tower) -> AsyncIterator[Stack]:
    async with running(tmp_path, tower) as stack:
        yield stack


def media_of(part: prompt_pb2.Media) -> Media:
    modality, *sides = part.path.split()
    return Modality(modality), Grid(*map(int, sides))


def prompt_of(media: Sequence[Media], own: dict[int, prompt_pb2.Pruning] | None = None) -> prompt_pb2.Prompt:
    parts = []
    for index, (modality, grid) in enumerate(media):
        item = prompt_pb2.Media(path=f"{modality.value} {grid.t} {grid.h} {grid.w}", pruning=(own or {}).get(index))
        video = modality is Modality.VIDEO
        parts.append(prompt_pb2.Part(video=item) if video else prompt_pb2.Part(image=item))
    parts.append(prompt_pb2.Part(text="What moves?"))
    return prompt_pb2.Prompt(messages=[prompt_pb2.Message(role=prompt_pb2.ROLE_USER, parts=parts)])


def first_request(
    media: Sequence[Media], rate: float = 0.0, own: dict[int, prompt_pb2.Pruning] | None = None
) -> EncodeRequest:
    return EncodeRequest(prompt=EncodePrompt(prompt=prompt_of(media, own), pruning=prompt_pb2.Pruning(rate=rate)))


def select(media_index: int) -> EncodeRequest:
    return EncodeRequest(select=prompt_pb2.Select(media_index=media_index))


SELECT_ALL = EncodeRequest(select=prompt_pb2.Select(all=True))


async def encode(stack: Stack, *requests: EncodeRequest) -> list[EncodeResponse]:
    """Everything that a call answers. Raises the leaf of the error tree that its status names."""
    call = stack.stub.Encode(iter(requests), timeout=TIMEOUT_S)
    try:
        return [response async for response in call]
    except grpc.aio.AioRpcError as error:
        raise error_from_status(error, "encoder") from error


@dataclass
class Received:
    kept: list[int] | None
    shape: list[int]
    data: bytes

    @property
    def embeds(self) -> NDArray[np.float32]:
        return np.frombuffer(self.data, np.float32).reshape(self.shape)


def embeds_in(responses: Sequence[EncodeResponse]) -> dict[int, Received]:
    """What was sent of each item, in the order in which it was sent."""
    received: dict[int, Received] = {}
    for message in (each.embeds for each in responses if each.HasField("embeds")):
        if message.media_index not in received:
            kept = int32_array(message.kept).tolist() if message.HasField("kept") else None
            received[message.media_index] = Received(kept, list(message.chunk.shape), b"")
        item = received[message.media_index]
        assert message.chunk.offset_bytes == len(item.data)
        item.data += message.chunk.data
    return received


def tower_embeds(tower: Tower, media_index: int, media: Media) -> torch.Tensor:
    frames = torch.from_numpy(frames_of(media_index, media[1], frame_count(media)))
    return torch.cat([tower.encode([each])[0] for each in frames.split(TINY.temporal_patch)], dim=1)[0]


# --- what is answered -------------------------------------------------------------------------------------------


async def test_the_plan_comes_first_and_then_every_items_embeddings(stack: Stack) -> None:
    media = [VIDEO, IMAGE, (Modality.VIDEO, Grid(2, 3, 3))]
    responses = await encode(stack, first_request(media), SELECT_ALL)
    assert responses[0].HasField("plan")
    received = embeds_in(responses)
    assert list(received) == [0, 1, 2]
    for index, item in enumerate(media):
        expected = tower_embeds(stack.tower, index, item)
        assert received[index].kept is None
        assert received[index].shape == [1, *expected.shape]
        np.testing.assert_allclose(received[index].embeds[0], expected.numpy(), atol=2e-6)


async def test_what_is_pruned_is_gathered_from_the_unpruned(stack: Stack) -> None:
    received = embeds_in(await encode(stack, first_request([VIDEO, IMAGE], rate=0.5), SELECT_ALL))
    expected = tower_embeds(stack.tower, 0, VIDEO)
    kept = keep_tokens(expected, GRID, Pruning(0.5))
    assert received[0].kept == kept.tolist()
    np.testing.assert_allclose(received[0].embeds[0], expected[kept.long()].numpy(), atol=2e-6)
    assert received[1].kept is None  # images are never pruned
    assert received[1].shape == [1, 6, TINY.hidden]


async def test_an_items_own_pruning_overrides_the_requests(stack: Stack) -> None:
    own = {1: prompt_pb2.Pruning(rate=0.25), 2: prompt_pb2.Pruning(rate=0.5, method="random", seed=3)}
    own[3] = prompt_pb2.Pruning(rate=0.5, method="none")
    received = embeds_in(await encode(stack, first_request([VIDEO] * 4, rate=0.75, own=own), SELECT_ALL))
    assert [item.shape[1] for item in received.values()] == [6, 18, 12, 24]
    assert received[2].kept == keep_tokens(torch.empty(24, 1), GRID, Pruning(0.5, "random", 3)).tolist()
    assert received[3].kept is None


async def test_only_what_is_selected_is_decoded_in_that_order(stack: Stack) -> None:
    responses = await encode(stack, first_request([VIDEO] * 4), select(2), select(0))
    assert list(embeds_in(responses)) == [2, 0]
    assert stack.preprocessing.selected == [2, 0]


async def test_all_are_those_that_were_not_selected_before(stack: Stack) -> None:
    responses = await encode(stack, first_request([VIDEO] * 3), select(1), SELECT_ALL)
    assert list(embeds_in(responses)) == [1, 0, 2]


async def test_nothing_is_selected_by_half_closing(stack: Stack) -> None:
    responses = await encode(stack, first_request([VIDEO]))
    assert [response.WhichOneof("response") for response in responses] == ["plan"]
    assert stack.preprocessing.selected == []


async def test_a_prompt_without_media_has_a_plan_and_nothing_else(stack: Stack) -> None:
    responses = await encode(stack, first_request([]), SELECT_ALL)
    assert [response.WhichOneof("response") for response in responses] == ["plan"]


async def test_progress_never_falls_and_is_complete_before_the_embeddings(stack: Stack) -> None:
    responses = await encode(stack, first_request([VIDEO, VIDEO]), SELECT_ALL)
    counts: dict[int, tuple[int, int]] = {}
    for response in responses:
        if response.HasField("progress"):
            progress = response.progress
            now = (progress.decoded_slices, progress.encoded_slices)
            before = counts.get(progress.media_index, (0, 0))
            assert before != now
            assert before[0] <= now[0] <= GRID.t
            assert before[1] <= now[1] <= now[0]
            counts[progress.media_index] = now
        if response.HasField("embeds"):
            assert counts[response.embeds.media_index] == (GRID.t, GRID.t)


async def test_large_arrays_come_and_go_in_pieces(stack: Stack) -> None:
    large = (Modality.VIDEO, Grid(17, 16, 16))
    responses = await encode(stack, first_request([large]), SELECT_ALL)
    sizes = [len(each.embeds.chunk.data) for each in responses if each.HasField("embeds")]
    assert sizes == [2**20, 2**20 // 16]
    received = embeds_in(responses)[0].embeds[0]
    np.testing.assert_allclose(received, tower_embeds(stack.tower, 0, large).numpy(), atol=2e-6)


# --- what is refused --------------------------------------------------------------------------------------------


async def check_served(stack: Stack) -> None:
    """The service is as it was: the next request is answered, and nothing is held."""
    stack.preprocessing.bend_plan = FakePreprocessing.bend_plan
    stack.preprocessing.bend_frames = FakePreprocessing.bend_frames
    stack.preprocessing.fail = None
    assert embeds_in(await encode(stack, first_request([VIDEO]), SELECT_ALL))[0].shape == [1, GRID.tokens, TINY.hidden]
    assert stack.room.held_bytes == 0


@pytest.mark.parametrize(
    ("requests", "complaint"),
    [
        ([], "first request .* prompt"),
        ([select(0)], "first request .* prompt"),
        ([first_request([VIDEO]), first_request([VIDEO])], "must be a select"),
        ([first_request([VIDEO]), select(1)], "below the plan's 1 media, got 1"),
        ([first_request([VIDEO]), select(-1)], "got -1"),
        ([first_request([VIDEO]), select(0), select(0)], "0 was selected before"),
        ([first_request([VIDEO], rate=1.0)], r"pruning\.rate .* got 1\.0"),
        ([first_request([VIDEO], own={0: prompt_pb2.Pruning(method="best")})], "'best' does not exist"),
    ],
)
async def test_a_wrong_request_is_refused_by_name(stack: Stack, requests: list[EncodeRequest], complaint: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=complaint):
        await encode(stack, *requests)
    await check_served(stack)


async def test_an_item_that_never_fits_the_buffer_is_refused_and_smaller_ones_are_served(
    tmp_path: Path, tower: Tower
) -> None:
    async with running(tmp_path, tower, room_bytes=ITEM_BYTES) as stack:
        with pytest.raises(errors.MediaRejected, match=rf"30 tokens, {ITEM_BYTES * 5 // 4} bytes .* {ITEM_BYTES}:"):
            await encode(stack, first_request([(Modality.VIDEO, Grid(5, 2, 3))]), SELECT_ALL)
        await check_served(stack)


def other_item(plan: PromptPlan, **changes: Any) -> PromptPlan:
    return replace(plan, media=(replace(plan.media[0], **changes), *plan.media[1:]))


BENT_PLANS: dict[str, Callable[[PromptPlan], PromptPlan]] = {
    "another checkpoint": lambda plan: replace(plan, fingerprint=bytes(32)),
    "more levels": lambda plan: replace(plan, embed_levels=1),
    "no media": lambda plan: replace(plan, media=()),
    "an image": lambda plan: replace(plan, media=plan_of([IMAGE], plan.fingerprint).media),
    "half a patch higher": lambda plan: other_item(plan, frame_height_px=2 * TOKEN_PX + 7),
    "a token narrower": lambda plan: other_item(plan, frame_width_px=2 * TOKEN_PX),
    "frames missing": lambda plan: other_item(plan, frames=6),
    "frames beyond": lambda plan: other_item(plan, frames=9),
}


@pytest.mark.parametrize("bend", BENT_PLANS.values(), ids=BENT_PLANS.keys())
async def test_a_plan_for_something_else_breaks_the_contract(
    stack: Stack, bend: Callable[[PromptPlan], PromptPlan]
) -> None:
    stack.preprocessing.bend_plan = bend
    with pytest.raises(errors.PeerContract):
        await encode(stack, first_request([VIDEO]), SELECT_ALL)
    assert stack.preprocessing.selected == []
    await check_served(stack)


FRAMES = frames_of(0, GRID, 2)

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
    "an item nobody asked for": lambda messages: messages + slice_messages(1, 0, FRAMES),
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
async def test_frames_that_were_not_promised_break_the_contract(stack: Stack, bend: Bend) -> None:
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
async def test_what_preprocessing_refuses_is_told_to_the_caller(stack: Stack, error: errors.FramesieveError) -> None:
    stack.preprocessing.fail = error
    with pytest.raises(type(error), match=str(error)):
        await encode(stack, first_request([VIDEO]), SELECT_ALL)
    await check_served(stack)


async def test_a_bug_of_preprocessings_names_the_stage_and_no_detail(stack: Stack) -> None:
    stack.preprocessing.fail = ZeroDivisionError("secret")
    with pytest.raises(errors.FramesieveError, match="an internal error in Preprocess") as raised:
        await encode(stack, first_request([VIDEO]), SELECT_ALL)
    assert "secret" not in str(raised.value)
    await check_served(stack)


async def iter_reads(call: Any) -> AsyncIterator[EncodeResponse]:
    while (response := await call.read()) is not grpc.aio.EOF:
        yield response


async def test_a_caller_that_could_select_more_is_told_as_well(stack: Stack) -> None:
    stack.preprocessing.fail = errors.MediaDamaged("9 of 10 frames cannot be decoded")
    call = stack.stub.Encode(timeout=TIMEOUT_S)
    await call.write(first_request([VIDEO, VIDEO]))
    await call.write(select(0))
    with pytest.raises(grpc.aio.AioRpcError, match="9 of 10"):
        [_ async for _ in iter_reads(call)]
    await check_served(stack)


async def test_a_bug_of_the_tower_fails_its_request_and_not_the_service(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(stack.batcher, "_encode", lambda slices: [][0])
        with pytest.raises(errors.FramesieveError, match=r"an internal error in Encode, request id \w+$"):
            await encode(stack, first_request([VIDEO]), SELECT_ALL)
    await check_served(stack)


async def test_a_preprocessing_service_that_is_gone_is_named(tmp_path: Path, tower: Tower) -> None:
    batcher = Batcher(tower.encode, budget_tokens=64)
    add = encoder_pb2_grpc.add_EncoderServiceServicer_to_server
    async with open_channel(f"unix:{tmp_path}/nobody") as nobody:
        servicer = EncoderServicer(tower, bytes(32), batcher, Room(2**20), nobody)
        async with serving(servicer, add, f"unix:{tmp_path}/e") as channel:
            stub = encoder_pb2_grpc.EncoderServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                [_ async for _ in stub.Encode(iter([first_request([VIDEO]), SELECT_ALL]), timeout=TIMEOUT_S)]
    batcher.close()
    error = error_from_status(raised.value, "encoder")
    assert isinstance(error, errors.Unavailable)
    assert error.stage == "preprocessing"


# --- room, and callers that leave -------------------------------------------------------------------------------


async def test_eight_requests_of_three_videos_complete_in_room_for_one_item(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, room_bytes=ITEM_BYTES) as stack:
        reserved: list[int] = []
        stack.preprocessing.on_select = lambda: reserved.append(stack.room.held_bytes)
        answers = await asyncio.gather(
            *(encode(stack, first_request([VIDEO] * 3, rate=0.5), SELECT_ALL) for _ in range(8))
        )
        assert [list(embeds_in(answer)) for answer in answers] == [[0, 1, 2]] * 8
        # Nothing was selected that had no room.
        assert reserved == [ITEM_BYTES] * 24
        assert stack.room.held_bytes == 0


async def test_items_are_in_flight_together_where_there_is_room(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, room_bytes=2 * ITEM_BYTES) as stack:
        stack.preprocessing.stall = True
        call = stack.stub.Encode(iter([first_request([VIDEO] * 3), SELECT_ALL]), timeout=TIMEOUT_S)
        assert (await call.read()).HasField("plan")
        await asyncio.wait_for(stack.preprocessing.stalled.wait(), TIMEOUT_S)
        while stack.room.held_bytes < stack.room.size_bytes:
            await asyncio.sleep(0.01)
        call.cancel()


async def test_a_caller_that_leaves_stops_the_decoder_and_frees_its_room(stack: Stack) -> None:
    stack.preprocessing.stall = True
    call = stack.stub.Encode(iter([first_request([VIDEO, VIDEO]), SELECT_ALL]), timeout=TIMEOUT_S)
    assert (await call.read()).HasField("plan")
    await asyncio.wait_for(stack.preprocessing.stalled.wait(), TIMEOUT_S)
    assert stack.room.held_bytes > 0
    call.cancel()
    await asyncio.wait_for(stack.preprocessing.cancelled.wait(), TIMEOUT_S)
    while stack.room.held_bytes:
        await asyncio.sleep(0.01)
    stack.preprocessing.stall = False
    await check_served(stack)


async def test_a_caller_that_leaves_while_it_waits_for_room_is_forgotten(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, room_bytes=ITEM_BYTES) as stack:
        stack.preprocessing.stall = True
        holder = stack.stub.Encode(iter([first_request([VIDEO]), SELECT_ALL]), timeout=TIMEOUT_S)
        await asyncio.wait_for(stack.preprocessing.stalled.wait(), TIMEOUT_S)
        stack.preprocessing.stall = False
        waiter = stack.stub.Encode(iter([first_request([VIDEO]), SELECT_ALL]), timeout=TIMEOUT_S)
        assert (await waiter.read()).HasField("plan")
        behind = asyncio.create_task(encode(stack, first_request([VIDEO]), SELECT_ALL))
        waiter.cancel()
        holder.cancel()
        assert list(embeds_in(await behind)) == [0]
        assert stack.room.held_bytes == 0


async def test_a_deadline_runs_down_the_chain(stack: Stack) -> None:
    stack.preprocessing.stall = True
    call = stack.stub.Encode(iter([first_request([VIDEO]), SELECT_ALL]), timeout=0.5)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        [_ async for _ in call]
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(stack.preprocessing.cancelled.wait(), TIMEOUT_S)
    stack.preprocessing.stall = False
    await check_served(stack)
