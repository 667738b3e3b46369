"""A stream's messages come in order: the plan, then the frames of each selected item, wherever the media come from."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal
from pathlib import Path
from time import monotonic_ns
from typing import Any

import av
import numpy as np
import pytest
from prometheus_client import REGISTRY

from common.contract.plan import PromptPlan
from common.contract.wire import PlanReceiver
from framesieve.v1 import prompt_pb2
from services.preprocessing.prompt.tokens import LARGE_TEXT_CHARS
from services.preprocessing.rpc.messages import frames_responses, plan_responses
from services.preprocessing.video.slices import Slice
from tests.preprocessing.media_server import fetched_files, ok
from tests.preprocessing.media_server import serving as web_server
from tests.preprocessing.preprocessing_media import clip, transformers_indices, without_packets
from tests.preprocessing.service import (
    EVERYTHING,
    INFLIGHT_SLICES,
    Queues,
    asked,
    by_url,
    fetching_from,
    frames_of,
    plan_of,
    prompt_of,
    select,
    sent,
    serving,
    settled,
    stopped,
    text,
    video,
)

# One event loop for the module, because the workers belong to it.
pytestmark = pytest.mark.asyncio(loop_scope="module")


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"framesieve_{name}", labels) or 0.0


async def test_everything_can_be_selected_at_once_and_is_counted(stub: Any) -> None:
    stages = {stage: metric("stage_busy_seconds_count", stage=stage) for stage in ("plan", "decode", "resize")}
    counted = metric("preprocessing_frames_total", outcome="decoded")
    call = await asked(stub, prompt_of(video(clip(60)), text("and"), video(clip(30)), text("?")), EVERYTHING)
    plan = await plan_of(call)
    order, frames, repaired = await frames_of(call, plan)
    assert (order, repaired) == ([0, 1], 0)
    for item, length in zip(plan.media, (60, 30), strict=True):
        assert item.frames == len(transformers_indices(length, 30.0, 2.0, 4, 768))
    assert [len(frames[index]) for index in order] == [item.frames for item in plan.media]
    total = sum(item.frames for item in plan.media)
    assert metric("preprocessing_frames_total", outcome="decoded") == counted + total
    for stage, count in stages.items():
        assert metric("stage_busy_seconds_count", stage=stage) == count + (1 if stage == "plan" else 2)


async def test_items_come_in_the_order_of_their_selection_and_no_others(stub: Any) -> None:
    call = await asked(stub, prompt_of(*[video(clip(30)) for _ in range(3)]), select(2), select(0))
    order, _, _ = await frames_of(call, await plan_of(call))
    assert order == [2, 0]


async def test_selecting_embeddings_sends_nothing(tiny_checkpoint: Path, tmp_path: Path, queues: Queues) -> None:
    embeds = prompt_pb2.MediaEmbeds(
        grid=prompt_pb2.Grid(t=3, h=2, w=2), seconds_per_grid=prompt_pb2.Rational(numerator=1, denominator=2)
    )
    parts = [video(clip(30)), prompt_pb2.Part(video=prompt_pb2.Media(embeds=embeds)), video(clip(30))]
    async with serving(tiny_checkpoint, None, tmp_path, queues) as made:
        for selects, expected in (([EVERYTHING], [0, 2]), ([select(1)], [])):
            call = await asked(made, prompt_of(*parts), *selects)
            plan = await plan_of(call)
            assert [item.brings_embeds for item in plan.media] == [False, True, False]
            assert (await frames_of(call, plan))[0] == expected


async def test_nothing_is_decoded_before_it_is_selected(stub: Any, decoded: list[int]) -> None:
    call = stub.Preprocess()
    await call.write(prompt_of(video(clip(60)), video(clip(60))))
    plan = await plan_of(call)
    await asyncio.sleep(0.1)
    assert decoded == []
    await call.write(select(1))
    await call.done_writing()
    order, _, _ = await frames_of(call, plan)
    assert order == [1]
    assert len(decoded) == plan.media[1].frames


async def test_a_slow_reader_pauses_the_decoder_and_cancelling_ends_it(stub: Any, decoded: list[int]) -> None:
    call = stub.Preprocess()
    await call.write(prompt_of(video(large(), fps=30.0, max_pixels=1024 * 1024)))
    plan = await plan_of(call)
    await call.write(select(0))
    await call.read()
    while True:
        count = len(decoded)
        await asyncio.sleep(0.6)
        if len(decoded) == count:
            break
    assert 2 * INFLIGHT_SLICES <= count < plan.media[0].frames / 2
    call.cancel()
    await asyncio.sleep(0.2)
    assert len(decoded) <= count + 2
    # The only worker is free again.
    again = await asked(stub, prompt_of(video(clip(30))))
    assert (await frames_of(again, await plan_of(again)))[0] == [0]


def large() -> bytes:
    """60 frames of 1024 × 1024."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=30)
        stream.width, stream.height, stream.pix_fmt = 1024, 1024, "yuv420p"
        for _ in range(60):
            frame = av.VideoFrame.from_ndarray(np.zeros((1024, 1024, 3), np.uint8), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


async def test_text_is_planned_while_all_readers_hang_and_other_prompts_wait(
    tiny_checkpoint: Path, tmp_path: Path, queues: Queues
) -> None:
    def planning(what: str, threads: str) -> float:
        return metric(f"preprocessing_planning_{what}", threads=threads)

    async def asking(*parts: Any) -> Any:
        call = stub.Preprocess()
        await call.write(prompt_of(*parts))
        return call

    data = clip(10)
    async with serving(tiny_checkpoint, None, tmp_path, queues, threads=2) as stub:
        with stopped(queues.reading) as pid:
            held = [await asking(video(data), text("?")) for _ in range(2)]
            assert await settled(lambda: queues.reading.jobs == 2)
            assert planning("jobs", "slow") == 2
            assert planning("waiting", "slow") == planning("oldest_seconds", "slow") == 0
            held += [await asking(video(data)), await asking(text("x" * (LARGE_TEXT_CHARS + 1)))]
            assert await settled(lambda: planning("waiting", "slow") == 2)
            assert planning("jobs", "slow") == 4
            first_s = planning("oldest_seconds", "slow")
            async with asyncio.timeout(20):
                assert not (await plan_of(await asking(text("x" * 1000)))).media
            assert planning("oldest_seconds", "slow") > first_s > 0
            assert planning("jobs", "quick") == planning("oldest_seconds", "quick") == 0
            os.kill(pid, signal.SIGCONT)
            async with asyncio.timeout(30):
                assert [len((await plan_of(call)).media) for call in held] == [1, 1, 1, 0]
        assert await settled(lambda: planning("jobs", "slow") == planning("oldest_seconds", "slow") == 0)


async def test_repaired_frames_are_reported_with_their_slice(stub: Any) -> None:
    data = without_packets(clip(60, container="matroska", codec="mjpeg"), [20])
    call = await asked(stub, prompt_of(video(data, fps=15.0)))
    _, frames, repaired = await frames_of(call, await plan_of(call))
    assert repaired == 1
    assert np.array_equal(frames[0][10], frames[0][9])


async def test_only_the_first_chunk_of_a_plan_or_slice_has_its_ages_and_repairs() -> None:
    ids = np.zeros(200_000, np.int32)
    plan = PromptPlan(ids, np.tile(ids, (3, 1)), (), 0, bytes(32))
    first, *others = plan_responses(plan, monotonic_ns() - 10**9)
    assert others
    assert first.fetched_ago_s >= 1
    assert not any(each.HasField("fetched_ago_s") for each in (*others, *plan_responses(plan, None)))
    now_ns = monotonic_ns()
    pixels = np.zeros((2, 1000, 1000, 3), np.uint8)
    made = Slice(0, pixels, 1, 0.5, 0.5, decoded_ns=now_ns - 3 * 10**9, resized_ns=now_ns - 2 * 10**9)
    head, *tail = (response.frames for response in frames_responses(7, made))
    assert tail
    assert head.repaired_frames == 1
    assert head.decoded_ago_s >= 3
    assert head.decoded_ago_s > head.resized_ago_s >= 2
    assert {(each.repaired_frames, each.decoded_ago_s, each.resized_ago_s) for each in tail} == {(0, 0.0, 0.0)}


async def test_media_by_path_and_by_data_uri_equal_media_by_bytes(stub: Any, tmp_path: Path) -> None:
    data = clip(30)
    (tmp_path / "media" / "clip.mp4").write_bytes(data)
    uri = "data:video/mp4;base64," + base64.b64encode(data).decode()
    others = [prompt_pb2.Part(video=media) for media in (prompt_pb2.Media(path="clip.mp4"), prompt_pb2.Media(url=uri))]
    call = await asked(stub, prompt_of(video(data), *others))
    plan = await plan_of(call)
    assert len({item.content_hash for item in plan.media}) == 1
    _, frames, _ = await frames_of(call, plan)
    for each in (1, 2):
        assert np.array_equal(frames[each], frames[0])


async def test_media_by_url_equal_media_by_bytes(tiny_checkpoint: Path, tmp_path: Path, queues: Queues) -> None:
    data = clip(30)
    count = metric("stage_busy_seconds_count", stage="fetch")
    fetched_bytes = metric("preprocessing_fetched_bytes_total")
    async with web_server(ok(data)) as server, fetching_from(server, tiny_checkpoint, tmp_path, queues) as stub:
        call = await sent(stub, prompt_of(by_url(server), text("and"), video(data), by_url(server)))
        response = await call.read()
        assert 0 < response.fetched_ago_s < 60
        plan = PlanReceiver().add(response.plan)
        assert plan
        assert fetched_files(tmp_path) == 2
        await call.write(EVERYTHING)
        await call.done_writing()
        _, frames, _ = await frames_of(call, plan)
    assert len({item.content_hash for item in plan.media}) == 1
    for each in (0, 2):
        assert np.array_equal(frames[each], frames[1])
    assert metric("stage_busy_seconds_count", stage="fetch") == count + 1
    assert metric("preprocessing_fetched_bytes_total") == fetched_bytes + 2 * len(data)
