"""Questions through three real processes: answers, clear refusals, and the next request is always served."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable

import pytest
from framesieve.v1 import preprocessing_pb2, preprocessing_pb2_grpc, prompt_pb2

from common.channels import open_channel
from common.contract import errors
from common.contract.plan import Modality
from common.contract.tensors import MAX_PIECE_BYTES
from framesieve.cli.launcher import LocalStack
from framesieve.client.answer import Accepted, Answer, Delta, Finished, FinishReason, Progress
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Image, Message, Text, Video
from tests import media
from tests.integration.conftest import KV_CACHE_TOKENS, idle, metric, settles


@pytest.fixture
async def client(stack: LocalStack) -> AsyncIterator[FramesieveClient]:
    async with FramesieveClient(stack.address) as connected:
        yield connected


async def next_request_is_served(client: FramesieveClient) -> Answer:
    answer = await client.ask(Video(data=media.clip()), "What moves?", max_new_tokens=4, timeout_s=30)
    assert answer.usage.completion_tokens >= 1
    return answer


# --- answers ----------------------------------------------------------------------------------------------------


async def test_a_question_about_a_clip_is_answered_in_order(client: FramesieveClient) -> None:
    events = [
        event
        async for event in client.stream(
            Video(data=media.clip(16, fps=4, seed=50)),
            "What moves?",
            pruning_rate=0.5,
            max_new_tokens=8,
            request_id="mine",
        )
    ]
    kinds = [type(event) for event in events]
    assert kinds[0] is Accepted
    assert kinds[-1] is Finished
    assert Progress in kinds
    assert kinds.index(Delta) > max(i for i, kind in enumerate(kinds) if kind is Progress)
    accepted, finished = events[0], events[-1]
    assert isinstance(accepted, Accepted)
    assert isinstance(finished, Finished)
    assert accepted.request_id == "mine"
    # 4 s at 2 frames a second: 8 frames, 4 slices of 4 × 4 tokens, half of which stay.
    (item,) = finished.usage.media
    assert (item.modality, str(item.grid), item.kept_tokens) == (Modality.VIDEO, "4×4×4", 32)
    assert finished.usage.prompt_tokens_full - finished.usage.prompt_tokens == 32


async def test_the_stages_sum_to_the_time_to_first_token(client: FramesieveClient) -> None:
    answer = await next_request_is_served(client)
    assert sum(answer.timings.stages_s.values()) == pytest.approx(answer.timings.time_to_first_token_s, abs=1e-6)
    assert all(seconds >= 0 for seconds in answer.timings.stages_s.values())


async def test_the_same_request_gives_the_same_answer_alone_and_among_others(client: FramesieveClient) -> None:
    def ask(seed: int) -> asyncio.Future[Answer]:
        return asyncio.ensure_future(
            client.ask(
                Video(data=media.clip(seed=seed)),
                "What moves?",
                pruning_rate=0.5,
                max_new_tokens=12,
                temperature=0.8,
                seed=seed,
                logprobs=True,
            )
        )

    alone = [await ask(seed) for seed in range(4)]
    together = await asyncio.gather(*(ask(seed) for seed in range(4)))
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


async def test_text_alone_needs_no_encoder(stack: LocalStack, client: FramesieveClient) -> None:
    await idle(stack)
    before = metric(stack, "encoder", "framesieve_requests_total", method="Encode")
    answer = await client.ask(None, "Hello?", max_new_tokens=4)
    assert answer.usage.media == ()
    await idle(stack)
    assert metric(stack, "encoder", "framesieve_requests_total", method="Encode") == before


async def test_images_videos_and_turns_mix(client: FramesieveClient) -> None:
    history = [
        Message("user", (Image(data=media.picture(112, 84)), Text("What is this?"))),
        Message("assistant", (Text("A picture."),)),
    ]
    parts = [Video(data=media.clip(seed=1)), Image(data=media.picture(56, 56)), Video(data=media.clip(seed=2))]
    answer = await client.ask(parts, "And these?", history=history, pruning_rate=0.75, max_new_tokens=4)
    assert [item.modality.value for item in answer.usage.media] == ["image", "video", "image", "video"]
    assert [item.kept_tokens == item.grid.tokens for item in answer.usage.media] == [True, False, True, False]


async def test_a_path_below_the_media_root_is_read(client: FramesieveClient) -> None:
    answer = await client.ask(Video(server_path="clip.mp4"), "What moves?", max_new_tokens=2)
    assert answer.usage.media[0].modality is Modality.VIDEO


async def test_an_answer_says_when_only_the_first_slice_is_left(client: FramesieveClient) -> None:
    answer = await client.ask(Video(data=media.clip()), "What moves?", pruning_rate=0.75, max_new_tokens=1)
    assert answer.usage.media[0].first_slice_only
    assert answer.reason is FinishReason.LENGTH


async def test_five_mib_of_one_slice_cross_in_pieces(stack: LocalStack) -> None:
    """A picture of 1400 × 1400 pixels is a slice of 5.6 MiB."""
    request = preprocessing_pb2.PreprocessRequest()
    message = request.prompt.messages.add(role=prompt_pb2.ROLE_USER)
    message.parts.add().image.data = media.picture(1400, 1400)
    message.parts[0].image.frame_sampling.max_pixels = 1400 * 1400
    everything = preprocessing_pb2.PreprocessRequest(select=prompt_pb2.Select(all=True))
    received = 0
    async with open_channel(stack.addresses["preprocessing"]) as channel:
        async for response in preprocessing_pb2_grpc.PreprocessingServiceStub(channel).Preprocess(
            iter([request, everything])
        ):
            chunk = response.frames.chunk
            if response.WhichOneof("response") == "frames":
                assert chunk.offset_bytes == received
                assert len(chunk.data) <= MAX_PIECE_BYTES
                received += len(chunk.data)
                shape = list(chunk.shape)
    assert shape[0] == 1
    assert received == math.prod(shape) > 5 * 2**20


# --- refusals ---------------------------------------------------------------------------------------------------


REFUSED = {
    "a corrupt file": (lambda: Video(data=b"\x00\x01\x02" * 1000), errors.MediaRejected),
    "a file with sound alone": (lambda: Video(data=media.sound()), errors.MediaRejected),
    "a clip whose index promises frames that do not come": (
        lambda: Video(data=media.clip_without_its_end()),
        errors.MediaDamaged,
    ),
    "a path outside the media root": (lambda: Video(server_path="../../etc/passwd"), errors.MediaForbidden),
    "a video sampled at minus one frame a second": (lambda: Video(data=media.clip(), fps=-1), errors.InvalidRequest),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_bad_media_is_refused_and_the_next_request_served(client: FramesieveClient, name: str) -> None:
    make: Callable[[], Video] = REFUSED[name][0]
    with pytest.raises(REFUSED[name][1]):
        await client.ask(make(), "What moves?", timeout_s=30)
    await next_request_is_served(client)


async def test_a_picture_of_one_pixel_is_answered(client: FramesieveClient) -> None:
    answer = await client.ask(Image(data=media.picture(1, 1)), "What is this?", max_new_tokens=2)
    assert answer.usage.media[0].grid.tokens >= 1


async def test_an_empty_prompt_is_refused(client: FramesieveClient) -> None:
    with pytest.raises(errors.InvalidRequest):
        await client.ask(None, "")
    await next_request_is_served(client)


async def test_a_prompt_longer_than_the_cache_is_refused_before_anything_is_decoded(
    stack: LocalStack, client: FramesieveClient
) -> None:
    await idle(stack)
    decoded = metric(stack, "preprocessing", "framesieve_stage_busy_seconds_count", stage="decode")
    many = [Video(data=media.clip(256, fps=4, seed=seed)) for seed in range(5)]
    with pytest.raises(errors.PromptTooLong, match=str(KV_CACHE_TOKENS)):
        await client.ask(many, "What moves?", max_new_tokens=1)
    await idle(stack)
    assert metric(stack, "preprocessing", "framesieve_stage_busy_seconds_count", stage="decode") == decoded
    await next_request_is_served(client)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pruning_rate": 1.0}, "rate"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"request_id": "x" * 129}, "request_id"),
    ],
)
async def test_a_value_outside_its_range_is_named(
    client: FramesieveClient, options: dict[str, float | str], says: str
) -> None:
    with pytest.raises(errors.InvalidRequest, match=says):
        await client.ask(Video(data=media.clip()), "What moves?", **options)  # type: ignore[arg-type]


# --- clients that vanish, deadlines -----------------------------------------------------------------------------


async def test_a_client_that_vanishes_while_it_reads_leaves_no_block_behind(
    stack: LocalStack, client: FramesieveClient
) -> None:
    async for event in client.stream(Video(data=media.clip()), "What moves?", max_new_tokens=1000, stop=["\x00"]):
        if isinstance(event, Delta):
            break
    assert await settles(lambda: metric(stack, "generation", "framesieve_generation_kv_blocks_used"), 0)
    assert await settles(lambda: metric(stack, "generation", "framesieve_generation_media_buffer_used_bytes"), 0)
    await next_request_is_served(client)


async def test_a_client_that_vanishes_while_its_video_is_decoded_stops_the_decoder(
    stack: LocalStack, client: FramesieveClient
) -> None:
    async for event in client.stream(Video(data=media.clip(512, fps=8)), "What moves?"):
        if isinstance(event, Progress):
            break
    for service, method in (("generation", "Generate"), ("encoder", "Encode"), ("preprocessing", "Preprocess")):
        assert await settles(
            lambda service=service, method=method: metric(  # type: ignore[misc]
                stack, service, "framesieve_requests_running", method=method
            ),
            0,
        )
    await next_request_is_served(client)


async def test_a_deadline_that_passes_is_said_to_have_passed(client: FramesieveClient) -> None:
    with pytest.raises(errors.DeadlinePassed):
        await client.ask(Video(data=media.clip(512, fps=8)), "What moves?", timeout_s=0.05)
    await next_request_is_served(client)
