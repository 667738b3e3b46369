"""The stream keeps its order: plan, selections, frames, wherever the media come from."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import av
import grpc
import numpy as np
import pytest
from prometheus_client import REGISTRY

from common.contract.wire import PlanReceiver
from framesieve.v1 import prompt_pb2
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
    text,
    video,
)

# One event loop for all, to which the workers belong: starting them takes longer than most tests.
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_everything_can_be_selected_at_once(stub: Any) -> None:
    call = await asked(stub, prompt_of(video(clip(60)), text("and"), video(clip(30)), text("?")), EVERYTHING)
    plan = await plan_of(call)
    order, frames, repaired = await frames_of(call, plan)
    assert order == [0, 1]
    assert repaired == 0
    for item, length in zip(plan.media, (60, 30), strict=True):
        assert item.frames == len(transformers_indices(length, 30.0, 2.0, 4, 768))
    assert [len(frames[index]) for index in order] == [item.frames for item in plan.media]


async def test_half_closing_without_a_select_ends_after_the_plan(stub: Any, decoded: list[int]) -> None:
    call = stub.Preprocess()
    await call.write(prompt_of(video(clip(60))))
    await call.done_writing()
    order, _, _ = await frames_of(call, await plan_of(call))
    assert (order, decoded) == ([], [])


async def test_items_come_in_the_order_of_their_selection_and_no_others(stub: Any) -> None:
    call = await asked(stub, prompt_of(*[video(clip(30)) for _ in range(3)]), select(2), select(0))
    order, _, _ = await frames_of(call, await plan_of(call))
    assert order == [2, 0]


async def test_embeddings_have_a_place_in_the_plan_and_selecting_them_sends_nothing(
    family_checkpoint: Path, tmp_path: Path, queues: Queues
) -> None:
    brought = prompt_pb2.MediaEmbeds(
        grid=prompt_pb2.Grid(t=3, h=2, w=2), seconds_per_grid=prompt_pb2.Rational(numerator=1, denominator=2)
    )
    parts = [video(clip(30)), prompt_pb2.Part(video=prompt_pb2.Media(embeds=brought)), video(clip(30))]
    async with serving(family_checkpoint, None, tmp_path, queues) as made:
        for selects, expected in (([EVERYTHING], [0, 2]), ([select(1), select(2)], [2]), ([select(1)], [])):
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


async def test_a_slow_reader_stops_the_decoder_and_one_that_leaves_ends_it(stub: Any, decoded: list[int]) -> None:
    call = stub.Preprocess()
    await call.write(prompt_of(video(large(), fps=30.0, max_pixels=1024 * 1024)))
    plan = await plan_of(call)
    await call.write(select(0))
    await call.read()
    while True:
        count = len(decoded)
        await asyncio.sleep(1)
        if len(decoded) == count:
            break
    assert 2 * INFLIGHT_SLICES <= count < plan.media[0].frames / 2
    call.cancel()
    await asyncio.sleep(0.3)
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


async def test_repaired_frames_are_told_with_their_slice(stub: Any) -> None:
    data = without_packets(clip(60, container="matroska", codec="mjpeg"), [20])
    call = await asked(stub, prompt_of(video(data, fps=15.0)))
    _, frames, repaired = await frames_of(call, await plan_of(call))
    assert repaired == 1
    assert np.array_equal(frames[0][10], frames[0][9])


async def test_metrics_count_frames_and_busy_stages(stub: Any) -> None:
    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, labels) or 0.0

    frames = value("framesieve_preprocessing_frames_total", outcome="decoded")
    stages = {
        stage: value("framesieve_stage_busy_seconds_count", stage=stage) for stage in ("plan", "decode", "resize")
    }
    call = await asked(stub, prompt_of(video(clip(60))))
    _, received, _ = await frames_of(call, await plan_of(call))
    assert value("framesieve_preprocessing_frames_total", outcome="decoded") == frames + len(received[0])
    for stage, count in stages.items():
        assert value("framesieve_stage_busy_seconds_count", stage=stage) == count + 1


async def test_each_slice_says_how_long_ago_it_was_decoded_and_resized(stub: Any) -> None:
    call = await asked(stub, prompt_of(video(clip(60)), video(clip(30))), EVERYTHING)
    first = await call.read()
    assert not first.HasField("fetched_ago_s")
    held = await call.read()
    await asyncio.sleep(0.3)  # what is decoded ahead of its reader grows old
    chunks = [held.frames]
    while (response := await call.read()) is not grpc.aio.EOF:
        chunks.append(response.frames)
    assert len(chunks) > 3
    for chunk in chunks:
        assert 0 < chunk.resized_ago_s < chunk.decoded_ago_s < 60
    # What one worker made later is told to be younger, but for the time that it waited to be sent.
    assert len({chunk.decoded_ago_s for chunk in chunks}) == len(chunks)


async def test_media_by_path_are_as_media_by_bytes(stub: Any, tmp_path: Path) -> None:
    data = clip(30)
    (tmp_path / "media" / "clip.mp4").write_bytes(data)
    by_path = await asked(stub, prompt_of(prompt_pb2.Part(video=prompt_pb2.Media(path="clip.mp4"))))
    by_bytes = await asked(stub, prompt_of(video(data)))
    first, second = await plan_of(by_path), await plan_of(by_bytes)
    assert first.media == second.media
    frames = [(await frames_of(call, first))[1][0] for call in (by_path, by_bytes)]
    assert np.array_equal(frames[0], frames[1])


async def test_media_by_url_are_as_media_by_bytes(tiny_checkpoint: Path, tmp_path: Path, queues: Queues) -> None:
    data = clip(30)
    stage = {"stage": "fetch"}
    count = REGISTRY.get_sample_value("framesieve_stage_busy_seconds_count", stage) or 0.0
    fetched_bytes = REGISTRY.get_sample_value("framesieve_preprocessing_fetched_bytes_total") or 0.0
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
    assert REGISTRY.get_sample_value("framesieve_stage_busy_seconds_count", stage) == count + 1
    grown = (REGISTRY.get_sample_value("framesieve_preprocessing_fetched_bytes_total") or 0.0) - fetched_bytes
    assert grown == 2 * len(data)


async def test_a_data_uri_is_as_its_bytes(stub: Any) -> None:
    data = clip(30)
    uri = "data:video/mp4;base64," + base64.b64encode(data).decode()
    call = await asked(stub, prompt_of(prompt_pb2.Part(video=prompt_pb2.Media(url=uri)), video(data)))
    first, second = (await plan_of(call)).media
    assert first.content_hash == second.content_hash
