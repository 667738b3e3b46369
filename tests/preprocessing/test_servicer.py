"""A stream: the plan, then the frames of each selected item, wherever the media come from; or a refusal with a reason.

One event loop for the module, because the workers belong to it.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import signal
from time import monotonic_ns
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client import REGISTRY

from gridsieve.common.contract.plan import PromptPlan
from gridsieve.common.contract.wire import PlanReceiver
from gridsieve.services.preprocessing.prompt.plain_text import LARGE_TEXT_CHARS
from gridsieve.services.preprocessing.rpc.messages import frames_responses, plan_responses
from gridsieve.services.preprocessing.sources.source import bytes_source
from gridsieve.services.preprocessing.video.packets import read_packets
from gridsieve.services.preprocessing.video.slices import Slice
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.preprocessing_pb2 import PreprocessRequest
from tests import media
from tests.preprocessing.media_server import fetched_files, ok, url_of
from tests.preprocessing.media_server import serving as web_server
from tests.preprocessing.preprocessing_media import B_FRAMES, clip, transformers_indices, without_packets
from tests.preprocessing.service import (
    EVERYTHING,
    INFLIGHT_SLICES,
    Service,
    asked,
    frames_of,
    plan_of,
    prompt_of,
    refused,
    select,
    sent,
    serves,
    stopped,
    text,
    video,
)
from tests.preprocessing.worker_jobs import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

CLIP = clip(30)


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"gridsieve_{name}", labels) or 0.0


async def test_everything_can_be_selected_at_once_and_is_counted(stub: Any) -> None:
    stages = {stage: metric("stage_busy_seconds_count", stage=stage) for stage in ("plan", "decode", "resize")}
    counted = metric("preprocessing_frames_total", outcome="decoded")
    call = await asked(stub, prompt_of(video(clip(60)), text("and"), video(CLIP), text("?")), EVERYTHING)
    frames, repaired = await frames_of(call, await plan_of(call))
    expected = {index: len(transformers_indices(length, 30.0, 2.0, 4, 768)) for index, length in ((0, 60), (1, 30))}
    assert {index: len(each) for index, each in frames.items()} == expected
    assert repaired == 0
    assert metric("preprocessing_frames_total", outcome="decoded") == counted + sum(expected.values())
    for stage, count in stages.items():
        assert metric("stage_busy_seconds_count", stage=stage) == count + (1 if stage == "plan" else 2)


async def test_items_come_in_the_order_of_their_selection_and_no_others(stub: Any) -> None:
    assert await serves(stub, prompt_of(*[video(CLIP)] * 3), select(2), select(0)) == [2, 0]


async def test_selecting_embeddings_sends_nothing(stub: Any) -> None:
    second = prompt_pb2.Rational(numerator=1, denominator=1)
    embeds = prompt_pb2.MediaEmbeds(grid=prompt_pb2.Grid(t=3, h=2, w=2), seconds_per_grid=second)
    prompt = prompt_of(video(CLIP), video(embeds=embeds), video(CLIP))
    assert await serves(stub, prompt) == [0, 2]
    assert await serves(stub, prompt, select(1)) == []


async def test_nothing_is_decoded_before_it_is_selected(stub: Any, decoded: list[int]) -> None:
    call = await sent(stub, prompt_of(video(CLIP), video(CLIP)))
    plan = await plan_of(call)
    await asyncio.sleep(0.1)
    assert decoded == []
    await call.write(select(1))
    await call.done_writing()
    frames, _ = await frames_of(call, plan)
    assert list(frames) == [1]
    assert len(decoded) == plan.media[1].frames.count


async def test_a_slow_reader_pauses_the_decoder_and_cancelling_ends_it(stub: Any, decoded: list[int]) -> None:
    large = clip(36, codec="mpeg4", size=(1024, 1024))
    call = await sent(stub, prompt_of(video(large, frame_sampling={"fps": 30.0, "max_pixels": 2**20})), select(0))
    await call.read()
    count = -1
    while count < len(decoded):
        count = len(decoded)
        await asyncio.sleep(0.3)
    assert 2 * INFLIGHT_SLICES <= count < 30
    call.cancel()
    await asyncio.sleep(0.2)
    assert len(decoded) <= count + 2
    assert await serves(stub, prompt_of(video(CLIP))) == [0]  # by the only worker


async def test_text_is_planned_while_all_readers_hang_and_other_prompts_wait(service: Service) -> None:
    def planning(what: str, threads: str) -> float:
        return metric(f"preprocessing_planning_{what}", threads=threads)

    reading = service.queues.reading
    async with service.serving(threads=2) as stub:
        with stopped(reading) as pid:
            held = [await sent(stub, prompt_of(video(CLIP), text("?"))) for _ in range(2)]
            await until(lambda: reading.jobs == 2)
            assert planning("jobs", "slow") == 2
            assert planning("waiting", "slow") == planning("oldest_seconds", "slow") == 0
            held += [await sent(stub, prompt_of(part)) for part in (video(CLIP), text("x" * (LARGE_TEXT_CHARS + 1)))]
            await until(lambda: planning("waiting", "slow") == 2)
            first_s = planning("oldest_seconds", "slow")
            async with asyncio.timeout(20):
                assert not (await plan_of(await sent(stub, prompt_of(text("x" * 1000))))).media
            assert planning("oldest_seconds", "slow") > first_s > 0
            assert planning("jobs", "quick") == planning("oldest_seconds", "quick") == 0
            os.kill(pid, signal.SIGCONT)
            async with asyncio.timeout(30):
                assert [len((await plan_of(call)).media) for call in held] == [1, 1, 1, 0]
        await until(lambda: planning("jobs", "slow") == planning("oldest_seconds", "slow") == 0)


async def test_repaired_frames_are_reported_with_their_slice(stub: Any) -> None:
    data = without_packets(clip(60, container="matroska", codec="mjpeg"), [20])
    call = await asked(stub, prompt_of(video(data, frame_sampling={"fps": 15.0})))
    frames, repaired = await frames_of(call, await plan_of(call))
    assert repaired == 1
    assert np.array_equal(frames[0][10], frames[0][9])


async def test_a_slice_that_repeats_an_earlier_one_is_announced_instead_of_sent(stub: Any) -> None:
    shown = [(1, 1), (2, 2), (2, 2), (1, 1), (1, 2)]
    pictures = [media.picture(56, 56, seed) for pair in shown for seed in pair]
    frames = prompt_pb2.PictureFrames(pictures=pictures, timestamps_s=range(len(pictures)))
    image = prompt_pb2.Part(image=prompt_pb2.Media(data=pictures[0]))
    call = await asked(stub, prompt_of(video(frames=frames), image))
    await plan_of(call)
    sent = []
    while (response := await call.read()) is not grpc.aio.EOF:
        sent.append(response.frames)
    repeats = [each.repeats_frame if each.HasField("repeats_frame") else None for each in sent]
    assert repeats == [None, None, 2, 0, None, None]
    assert [each.HasField("chunk") for each in sent] == [each is None for each in repeats]
    assert [len(each.digest) for each in sent] == [32, 32, 0, 0, 32, 0]
    assert len({each.digest for each in sent}) == 4


async def test_only_the_first_chunk_of_a_plan_or_slice_has_its_ages_and_repairs() -> None:
    ids = np.zeros(200_000, np.int32)
    plan = PromptPlan(ids, np.tile(ids, (3, 1)), (), 0, bytes(32))
    now_ns = monotonic_ns()
    first, *others = plan_responses(plan, now_ns - 10**9)
    assert others
    assert first.fetched_ago_s >= 1
    assert not any(each.HasField("fetched_ago_s") for each in (*others, *plan_responses(plan, None)))
    pixels = np.zeros((2, 1000, 1000, 3), np.uint8)
    made = Slice(0, pixels, 1, 0.5, 0.5, decoded_ns=now_ns - 3 * 10**9, resized_ns=now_ns - 2 * 10**9)
    head, *tail = (response.frames for response in frames_responses(7, made))
    assert head.repaired_frames == 1
    assert head.decoded_ago_s >= 3 > head.resized_ago_s >= 2
    assert {(each.repaired_frames, each.decoded_ago_s, each.resized_ago_s) for each in tail} == {(0, 0.0, 0.0)}


async def test_media_by_path_by_data_uri_and_by_url_equal_media_by_bytes(service: Service) -> None:
    (service.media_root / "clip.mp4").write_bytes(CLIP)
    count = metric("stage_busy_seconds_count", stage="fetch")
    fetched_bytes = metric("preprocessing_fetched_bytes_total")
    async with web_server(ok(CLIP)) as web, service.serving(web) as stub:
        uri = "data:video/mp4;base64," + base64.b64encode(CLIP).decode()
        ways = [video(path="clip.mp4"), video(url=uri), video(url=url_of(web)), video(url=url_of(web))]
        call = await sent(stub, prompt_of(video(CLIP), text("and"), *ways))
        response = await call.read()
        assert 0 < response.fetched_ago_s < 60
        plan = PlanReceiver().take_message(response.plan)
        assert plan
        assert fetched_files(service.folder) == 2
        await call.write(EVERYTHING)
        await call.done_writing()
        frames, _ = await frames_of(call, plan)
    assert len({item.content_hash for item in plan.media}) == 1
    assert all(np.array_equal(frames[way], frames[0]) for way in range(5))
    assert metric("stage_busy_seconds_count", stage="fetch") == count + 1
    assert metric("preprocessing_fetched_bytes_total") == fetched_bytes + 2 * len(CLIP)


def file_pieces(data: bytes, size_bytes: int) -> list[PreprocessRequest]:
    pieces = (data[offset : offset + size_bytes] for offset in range(0, len(data), size_bytes))
    return [PreprocessRequest(file=prompt_pb2.FilePiece(data=piece)) for piece in pieces]


def image(**fields: Any) -> prompt_pb2.Part:
    return prompt_pb2.Part(image=prompt_pb2.Media(**fields))


NO_PROMPT = "first request of a stream must be a prompt"
WITHOUT_ROLE = prompt_pb2.Prompt(messages=[prompt_pb2.Message(parts=[text("hi")])])
INLINE = [video(url="data:," + "x" * 9 * 2**20), video(bytes(8 * 2**20))]


@pytest.mark.parametrize(
    ("requests", "named"),
    [
        ([], NO_PROMPT),
        ([select(0)], NO_PROMPT),
        ([prompt_of(video(CLIP)), select(1)], "below the plan's 1 media, got 1"),
        ([prompt_of(video(CLIP)), select(0), select(0)], "0 was already selected"),
        ([PreprocessRequest(prompt=prompt_pb2.Prompt())], "prompt.messages must hold at least one message"),
        ([prompt_of()], r"prompt.messages\[0\].parts must hold at least one part"),
        ([prompt_of(text(""), text(""))], "no media and only empty text"),
        ([prompt_of(prompt_pb2.Part())], r"prompt.messages\[0\].parts\[0\] must hold text, image, video or audio"),
        ([PreprocessRequest(prompt=WITHOUT_ROLE)], r"\[0\].role must be system, user, assistant or tool, got 0"),
        ([prompt_of(text("x"), video())], r"parts\[1\].video must hold data, data_bytes, url, path, frames or embeds"),
        (
            [prompt_of(text("x"), image(url="a.org"))],
            r"^prompt.messages\[0\].parts\[1\].image.url must start",
        ),
        ([prompt_of(video(url="DATA:;base64,a"))], r"\[0\].parts\[0\].video.url must be base64: "),
        ([prompt_of(*[video(url="http://127.0.0.1/")] * 33)], "33 media by URL, at most 32 are allowed"),
        ([prompt_of(*INLINE)], "17825792 bytes of inline media, --max-inline-bytes is 16777216"),
        ([prompt_of(video(data_bytes=2**25))], "33554432 bytes of inline media, --max-inline-bytes is 16777216"),
        ([prompt_of(video(data_bytes=0))], r"parts\[0\].video.data_bytes must be at least 1, got 0"),
        ([prompt_of(video(frames={"sizes_bytes": [5, -1]}))], r"video.frames.sizes_bytes must be at least 1, got -1"),
        (
            [prompt_of(video(frames={"sizes_bytes": [2**23, 2**24], "timestamps_s": [0, 1]}))],
            "25165824 bytes of inline media, --max-inline-bytes is 16777216",
        ),
        (
            [prompt_of(video(frames={"pictures": [bytes(2**23), bytes(2**23 + 1)], "timestamps_s": [0, 1]}))],
            "16777217 bytes of inline media, --max-inline-bytes is 16777216",
        ),
        (
            [prompt_of(video(data_bytes=9)), *file_pieces(bytes(10), 10)],
            "a file piece of 1 to 9 bytes, got 10",
        ),
        ([prompt_of(video(data_bytes=9)), PreprocessRequest(file={})], "a file piece of 1 to 9 bytes, got 0"),
        ([prompt_of(video(CLIP)), *file_pieces(b"x", 1)], "must be a select"),
    ],
)
async def test_a_wrong_request_is_refused_with_its_field(
    stub: Any, requests: list[PreprocessRequest], named: str
) -> None:
    code, reason, message = await refused(await sent(stub, *requests))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert re.search(named, message)


FASTSTART = clip(30, codec="mjpeg", container_options={"movflags": "faststart"})
CUT_OFF = FASTSTART[: len(FASTSTART) * 2 // 3]
DAMAGED = without_packets(clip(30, container="matroska", codec="mjpeg"), range(4, 30))


@pytest.mark.parametrize(
    ("media", "code", "reason"),
    [
        ({"data": b"garbage" * 99}, "INVALID_ARGUMENT", "MEDIA_REJECTED"),
        ({"url": "data:,"}, "INVALID_ARGUMENT", "MEDIA_REJECTED"),
        ({"path": "../socket"}, "PERMISSION_DENIED", "MEDIA_FORBIDDEN"),
        ({"data": DAMAGED}, "INVALID_ARGUMENT", "MEDIA_DAMAGED"),
    ],
)
async def test_bad_media_are_refused_with_status_and_reason(
    stub: Any, media: dict[str, Any], code: str, reason: str
) -> None:
    call = await sent(stub, prompt_of(video(**media)), *[EVERYTHING] * (reason == "MEDIA_DAMAGED"))
    assert (await refused(call))[:2] == (grpc.StatusCode[code], reason)


async def test_a_file_that_was_cut_off_is_taken_on_request_and_its_missing_frames_are_counted(stub: Any) -> None:
    """By the index of an MP4 and by the duration of a Matroska file, whose frames are all of one size."""
    matroska = clip(60, container="matroska", codec="rawvideo")
    cut = {"mp4": CUT_OFF, "matroska": matroska[: len(matroska) // 2]}
    for container, data in cut.items():
        there = len(read_packets(bytes_source("video", data)).times.ticks)
        call = await sent(stub, prompt_of(video(data, frame_sampling={"allow_truncated": True})))
        (media,) = (await plan_of(call)).media
        promised = {"mp4": 30, "matroska": 60}[container]
        assert abs(media.file.missing_frames - (promised - there)) <= 1, container
        assert there < promised * 0.8
        call.cancel()
    refusal = await refused(await sent(stub, prompt_of(video(CUT_OFF))))
    assert refusal[1] == "MEDIA_DAMAGED"
    assert re.search(r"video is cut off: 1\d of its 3\d frames are missing.*allow_truncated accepts", refusal[2])
    whole = await sent(stub, prompt_of(video(FASTSTART), video(matroska)))
    assert [media.file.missing_frames for media in (await plan_of(whole)).media] == [0, 0]
    early = {"start_s": 0.0, "end_s": 0.2}  # all of it is there
    call = await sent(stub, prompt_of(video(CUT_OFF, frame_sampling=early)))
    assert [media.file.missing_frames for media in (await plan_of(call)).media] == [0]


async def test_joined_recordings_follow_one_another_and_frames_without_a_keyframe_are_counted(stub: Any) -> None:
    first = clip(50, 25, "mpegts", options=B_FRAMES)
    cut = first[len(first) // 3 // 188 * 188 :]  # begins between two keyframes, 24 frames in
    (media,) = (await plan_of(await sent(stub, prompt_of(video(cut + first, frame_sampling={"fps": 25}))))).media
    assert (media.frames.count, media.file.dropped_frames) == (26 + 50, 10)
