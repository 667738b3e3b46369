"""The stream keeps its order: plan, selections, frames; and what is wrong is refused with a status that says so."""

from __future__ import annotations

import asyncio
import base64
import io
import re
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import av
import grpc
import numpy as np
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from prometheus_client import REGISTRY

from common.checkpoint import Checkpoint
from common.interceptors import RequestInterceptor
from common.plan import Modality, PromptPlan
from common.tensors import DType, TensorBuffer
from common.wire import PlanReceiver, add_chunk, buffer_for
from framesieve.v1 import preprocessing_pb2_grpc, prompt_pb2
from framesieve.v1.preprocessing_pb2 import PreprocessRequest
from services.preprocessing import servicer
from services.preprocessing.fetch.fetcher import Fetcher
from services.preprocessing.fetch.policy import FetchPolicy
from services.preprocessing.planner import Planner
from services.preprocessing.resize import UInt8Array
from services.preprocessing.servicer import PreprocessingServicer
from services.preprocessing.slices import PlannedMedia, PlannedVideo, Slice
from services.preprocessing.threads import Threads
from services.preprocessing.workers.jobs import IndexPicture, IndexVideo, Job, VideoSlices, slices_job
from services.preprocessing.workers.limits import Limits
from services.preprocessing.workers.pool import Pool
from services.preprocessing.workers.process import Fault
from services.preprocessing.workers.protocol import Facts
from tests.unit.loopback import Resolver, Server, fetched_files, head, ok, policy
from tests.unit.loopback import serving as web_server
from tests.unit.preprocessing_media import clip, sound, transformers_indices, without_packets

Stub = preprocessing_pb2_grpc.PreprocessingServiceStub
USER = prompt_pb2.ROLE_USER
INFLIGHT_SLICES = 4
SLICE_BYTES = 2 * 1024 * 1024 * 3


# One event loop for all, to which the workers belong: starting them takes longer than most tests.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, slots=True)
class Pools:
    """Of one worker each, which must all be there in the end."""

    reading: Pool
    decoding: Pool
    replaced: list[Fault]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pools() -> AsyncIterator[Pools]:
    limits = Limits(wall_s=60, memory_bytes=2**31, file_bytes=2**30, frames=2**20, length_s=10_000, pixels=2**40)
    replaced: list[Fault] = []
    async with (
        Pool(1, limits, 2**20, replaced.append) as reading,
        Pool(1, limits, INFLIGHT_SLICES * SLICE_BYTES, replaced.append) as decoding,
    ):
        yield Pools(reading, decoding, replaced)
        assert replaced == []


@asynccontextmanager
async def serving(
    checkpoint: Path, root: Path | None, folder: Path, pools: Pools, fetcher: Fetcher | None = None
) -> AsyncIterator[Any]:
    """A real server on a unix socket, and a stub to it."""
    planner = Planner(
        Checkpoint(checkpoint),
        root,
        lambda source: pools.reading.wait(IndexVideo(source)),
        lambda source: pools.reading.wait(IndexPicture(source)),
    )
    server = grpc.aio.server(
        interceptors=[RequestInterceptor()], options=[("grpc.max_receive_message_length", 20 * 2**20)]
    )
    fetcher = fetcher or Fetcher(FetchPolicy())
    async with Threads(1) as planning:
        made = PreprocessingServicer(planner, fetcher, planning, pools.decoding)
        preprocessing_pb2_grpc.add_PreprocessingServiceServicer_to_server(made, server)
        address = f"unix:{folder}/socket"
        server.add_insecure_port(address)
        await server.start()
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                yield Stub(channel)
        finally:
            await server.stop(1)


@pytest_asyncio.fixture(loop_scope="module")
async def stub(tiny_checkpoint: Path, tmp_path: Path, pools: Pools) -> AsyncIterator[Any]:
    (tmp_path / "media").mkdir()
    async with serving(tiny_checkpoint, tmp_path / "media", tmp_path, pools) as made:
        yield made
    assert (pools.reading.jobs, pools.decoding.jobs, pools.decoding.inflight_bytes) == (0, 0, 0)


def prompt_of(*parts: prompt_pb2.Part) -> PreprocessRequest:
    return PreprocessRequest(prompt=prompt_pb2.Prompt(messages=[prompt_pb2.Message(role=USER, parts=parts)]))


def video(data: bytes, **sampling: float) -> prompt_pb2.Part:
    wish = prompt_pb2.FrameSampling(**sampling)  # type: ignore[arg-type]
    return prompt_pb2.Part(video=prompt_pb2.Media(data=data, frame_sampling=wish))


def text(words: str) -> prompt_pb2.Part:
    return prompt_pb2.Part(text=words)


def select(index: int) -> PreprocessRequest:
    return PreprocessRequest(select=prompt_pb2.Select(media_index=index))


async def plan_of(call: Any) -> PromptPlan:
    receiver = PlanReceiver()
    while True:
        plan = receiver.add((await call.read()).plan)
        if plan is not None:
            return plan


async def frames_of(call: Any, plan: PromptPlan) -> tuple[list[int], dict[int, np.ndarray[Any, Any]], int]:
    """The items in the order in which they came, the frames of each, and how many were repaired."""
    order: list[int] = []
    received: dict[int, list[np.ndarray[Any, Any]]] = {}
    repaired = 0
    buffer: TensorBuffer | None = None
    while (response := await call.read()) is not grpc.aio.EOF:
        chunk = response.frames
        item = plan.media[chunk.media_index]
        if chunk.media_index not in received:
            order.append(chunk.media_index)
            received[chunk.media_index] = []
        held = received[chunk.media_index]
        count = 1 if item.modality is Modality.IMAGE else 2
        if buffer is None:
            assert chunk.first_frame == count * len(held)
            shape = (count, item.frame_height_px, item.frame_width_px, 3)
            buffer = buffer_for(chunk.chunk, [DType.UINT8], shape)
        add_chunk(buffer, chunk.chunk)
        repaired += chunk.repaired_frames
        if buffer.complete:
            held.append(np.frombuffer(buffer.data, np.uint8).reshape(buffer.shape))
            buffer = None
    return order, {index: np.concatenate(held) for index, held in received.items()}, repaired


async def refused(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """Status, reason and message of a stream that is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_to_the_end(call)
    error = caught.value
    details = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(error)
    assert status is not None
    status.details[0].Unpack(details)
    return error.code(), details.reason, error.details() or ""


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


EVERYTHING = PreprocessRequest(select=prompt_pb2.Select(all=True))


async def sent(stub: Any, *requests: PreprocessRequest) -> Any:
    """A call that has sent these and stays open, the later ones after the plan.

    grpc.aio forgets a refusal's status if it arrives while the client writes, so nothing is written into one.
    """
    call = stub.Preprocess()
    for index, request in enumerate(requests):
        if index == 1:
            await plan_of(call)
        await call.write(request)
    if not requests:
        await call.done_writing()
    return call


async def asked(stub: Any, *requests: PreprocessRequest) -> Any:
    """A call that has sent these, selected everything if it has selected nothing, and half-closed."""
    call = stub.Preprocess()
    for request in requests if len(requests) > 1 else (*requests, EVERYTHING):
        await call.write(request)
    await call.done_writing()
    return call


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


async def test_cancelling_after_the_plan_decodes_nothing(stub: Any, decoded: list[int]) -> None:
    for _ in range(5):
        call = stub.Preprocess()
        await call.write(prompt_of(video(clip(60))))
        await plan_of(call)
        call.cancel()
    await asyncio.sleep(0.2)
    assert decoded == []


async def test_items_come_in_the_order_of_their_selection_and_no_others(stub: Any) -> None:
    call = await asked(stub, prompt_of(*[video(clip(30)) for _ in range(3)]), select(2), select(0))
    order, _, _ = await frames_of(call, await plan_of(call))
    assert order == [2, 0]


async def test_embeddings_have_a_place_in_the_plan_and_selecting_them_sends_nothing(
    family_checkpoint: Path, tmp_path: Path, pools: Pools
) -> None:
    brought = prompt_pb2.MediaEmbeds(
        grid=prompt_pb2.Grid(t=3, h=2, w=2), seconds_per_grid=prompt_pb2.Rational(numerator=1, denominator=2)
    )
    parts = [video(clip(30)), prompt_pb2.Part(video=prompt_pb2.Media(embeds=brought)), video(clip(30))]
    async with serving(family_checkpoint, None, tmp_path, pools) as made:
        for selects, expected in (([EVERYTHING], [0, 2]), ([select(1), select(2)], [2]), ([select(1)], [])):
            call = await asked(made, prompt_of(*parts), *selects)
            plan = await plan_of(call)
            assert [item.brings_embeds for item in plan.media] == [False, True, False]
            assert (await frames_of(call, plan))[0] == expected


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every frame that comes out of a worker."""
    frames: list[int] = []

    @dataclass(frozen=True, slots=True)
    class Watched(VideoSlices):
        def piece(self, number: int, facts: Facts, data: UInt8Array) -> Slice:
            made = VideoSlices.piece(self, number, facts, data)
            frames.extend(range(made.first_frame, made.first_frame + len(made.pixels)))
            return made

    def watched(media: PlannedMedia) -> Job[Slice] | None:
        return Watched(media) if isinstance(media, PlannedVideo) else slices_job(media)

    monkeypatch.setattr(servicer, "slices_job", watched)
    return frames


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


async def test_metrics_count_frames_bytes_and_busy_stages(stub: Any) -> None:
    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, labels) or 0.0

    frames = value("framesieve_preprocessing_frames_total", outcome="decoded")
    sent = value("framesieve_streamed_bytes_total", direction="sent", kind="frames")
    stages = {
        stage: value("framesieve_stage_busy_seconds_count", stage=stage)
        for stage in ("open", "plan", "decode", "resize")
    }
    call = await asked(stub, prompt_of(video(clip(60))))
    _, received, _ = await frames_of(call, await plan_of(call))
    assert value("framesieve_preprocessing_frames_total", outcome="decoded") == frames + len(received[0])
    assert value("framesieve_streamed_bytes_total", direction="sent", kind="frames") == sent + received[0].nbytes
    for stage, count in stages.items():
        assert value("framesieve_stage_busy_seconds_count", stage=stage) == count + 1


CLIP = clip(4)


@pytest.mark.parametrize(
    ("requests", "named"),
    [
        ([PreprocessRequest()], "first request of a stream must be a prompt"),
        ([select(0)], "first request of a stream must be a prompt"),
        ([], "first request of a stream must be a prompt"),
        ([prompt_of(video(CLIP)), prompt_of(video(CLIP))], "must be a select"),
        ([prompt_of(video(CLIP)), select(1)], "below the plan's 1 media, got 1"),
        ([prompt_of(video(CLIP)), select(-1)], "below the plan's 1 media, got -1"),
        ([prompt_of(video(CLIP)), select(0), select(0)], "0 was selected before"),
        ([PreprocessRequest(prompt=prompt_pb2.Prompt())], "prompt.messages must hold at least one message"),
        ([prompt_of()], r"prompt.messages\[0\].parts must hold at least one part"),
        ([prompt_of(text(""), text(""))], "no media and only empty text"),
        ([prompt_of(prompt_pb2.Part())], r"prompt.messages\[0\].parts\[0\] must hold text, image or video"),
        (
            [PreprocessRequest(prompt=prompt_pb2.Prompt(messages=[prompt_pb2.Message(parts=[text("hi")])]))],
            r"prompt.messages\[0\].role must be system, user or assistant, got 0",
        ),
        (
            [prompt_of(text("x"), prompt_pb2.Part(video=prompt_pb2.Media()))],
            r"parts\[1\].video must hold data, url, path or embeds",
        ),
        (
            [prompt_of(text("x"), prompt_pb2.Part(image=prompt_pb2.Media(url="example.org/x.png")))],
            r"^prompt.messages\[0\].parts\[1\].image.url must start with http:// or https://",
        ),
        (
            [prompt_of(prompt_pb2.Part(video=prompt_pb2.Media(url="DATA:;base64,a")))],
            r"^prompt.messages\[0\].parts\[0\].video.url must be base64 after its comma",
        ),
        (
            [prompt_of(*[prompt_pb2.Part(video=prompt_pb2.Media(url="http://127.0.0.1/"))] * 33)],
            "33 media by URL, at most 32 are allowed",
        ),
        (
            [
                prompt_of(
                    prompt_pb2.Part(video=prompt_pb2.Media(url="data:," + "x" * 9 * 2**20)), video(bytes(8 * 2**20))
                )
            ],
            "17825792 bytes of inline media, at most 16777216 are allowed",
        ),
        ([prompt_of(video(CLIP, fps=0.0))], r"video.frame_sampling.fps must be above 0 and at most 1000, got 0.0"),
        (
            [prompt_of(prompt_pb2.Part(image=prompt_pb2.Media(data=b"x", frame_sampling={"fps": 2.0})))],
            "image.frame_sampling.fps is for videos",
        ),
        (
            [prompt_of(prompt_pb2.Part(video=prompt_pb2.Media(embeds={"grid": {"t": 2, "h": 1, "w": 1}})))],
            r"parts\[0\].video.embeds.seconds_per_grid or timestamps_s must be set: a video needs a time base",
        ),
        (
            [prompt_of(video(bytes(9 * 2**20)), video(bytes(8 * 2**20)))],
            "17825792 bytes of inline media, at most 16777216 are allowed",
        ),
    ],
)
async def test_a_wrong_request_is_refused_by_field(stub: Any, requests: list[PreprocessRequest], named: str) -> None:
    code, reason, message = await refused(await sent(stub, *requests))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert re.search(named, message)


@pytest.mark.parametrize(
    ("media", "code", "reason"),
    [
        ({"data": b"garbage" * 99}, "INVALID_ARGUMENT", "MEDIA_REJECTED"),
        ({"data": sound()}, "INVALID_ARGUMENT", "MEDIA_REJECTED"),
        ({"data": b""}, "INVALID_ARGUMENT", "MEDIA_REJECTED"),
        ({"url": "data:,"}, "INVALID_ARGUMENT", "MEDIA_REJECTED"),
        ({"url": "http://127.0.0.1/clip.mp4"}, "PERMISSION_DENIED", "MEDIA_FORBIDDEN"),
        ({"url": "file:///etc/passwd"}, "PERMISSION_DENIED", "MEDIA_FORBIDDEN"),
        ({"path": "nothing.mp4"}, "INVALID_ARGUMENT", "MEDIA_REJECTED"),
        ({"path": "../socket"}, "PERMISSION_DENIED", "MEDIA_FORBIDDEN"),
        ({"path": "/etc/passwd"}, "PERMISSION_DENIED", "MEDIA_FORBIDDEN"),
        (
            {"data": without_packets(clip(30, container="matroska", codec="mjpeg"), range(4, 30))},
            "INVALID_ARGUMENT",
            "MEDIA_DAMAGED",
        ),
    ],
)
async def test_bad_media_has_a_status_and_the_next_request_is_served(
    stub: Any, media: dict[str, Any], code: str, reason: str
) -> None:
    call = await sent(stub, prompt_of(prompt_pb2.Part(video=prompt_pb2.Media(**media))))
    if reason == "MEDIA_DAMAGED":
        await plan_of(call)
        await call.write(EVERYTHING)
    assert (await refused(call))[:2] == (grpc.StatusCode[code], reason)
    call = await asked(stub, prompt_of(video(clip(4))))
    assert (await frames_of(call, await plan_of(call)))[0] == [0]


async def test_media_by_path_are_as_media_by_bytes(stub: Any, tmp_path: Path) -> None:
    data = clip(30)
    (tmp_path / "media" / "clip.mp4").write_bytes(data)
    by_path = await asked(stub, prompt_of(prompt_pb2.Part(video=prompt_pb2.Media(path="clip.mp4"))))
    by_bytes = await asked(stub, prompt_of(video(data)))
    first, second = await plan_of(by_path), await plan_of(by_bytes)
    assert first.media == second.media
    frames = [(await frames_of(call, first))[1][0] for call in (by_path, by_bytes)]
    assert np.array_equal(frames[0], frames[1])


async def test_a_request_that_leaves_while_it_is_planned_leaves_no_file_open(stub: Any, tmp_path: Path) -> None:
    (tmp_path / "media" / "clip.mp4").write_bytes(clip(30))
    for _ in range(5):
        call = stub.Preprocess()
        await call.write(prompt_of(prompt_pb2.Part(video=prompt_pb2.Media(path="clip.mp4"))))
        call.cancel()
    await asyncio.sleep(0.3)
    open_files = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert tmp_path / "media" / "clip.mp4" not in open_files


# --- media by URL -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def fetching_from(
    server: Server, checkpoint: Path, folder: Path, pools: Pools, **limits: float
) -> AsyncIterator[Any]:
    """A stub whose service may reach that server as clip.test, and whose sources are all closed again at the end."""
    with mock.patch.object(tempfile, "tempdir", str(folder)):
        fetcher = Fetcher(policy(server.port, **limits), Resolver(clip_test=[["127.0.0.1"]]))
    async with serving(checkpoint, None, folder, pools, fetcher) as made:
        yield made
        assert await settled(lambda: fetched_files(folder) == 0)


async def settled(reached: Callable[[], bool]) -> bool:
    """Whether that comes true within five seconds."""
    for _ in range(500):
        if reached():
            return True
        await asyncio.sleep(0.01)
    return False


def by_url(server: Server, path: str = "/clip.mp4") -> prompt_pb2.Part:
    return prompt_pb2.Part(video=prompt_pb2.Media(url=f"http://clip.test:{server.port}{path}"))


async def drip(writer: asyncio.StreamWriter) -> None:
    writer.write(head(200))
    while True:
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.01)


async def test_media_by_url_are_as_media_by_bytes(tiny_checkpoint: Path, tmp_path: Path, pools: Pools) -> None:
    data = clip(30)
    stage = {"stage": "fetch"}
    count = REGISTRY.get_sample_value("framesieve_stage_busy_seconds_count", stage) or 0.0
    async with web_server(ok(data)) as server, fetching_from(server, tiny_checkpoint, tmp_path, pools) as stub:
        call = await sent(stub, prompt_of(by_url(server), text("and"), video(data), by_url(server)))
        plan = await plan_of(call)
        assert fetched_files(tmp_path) == 2
        await call.write(EVERYTHING)
        await call.done_writing()
        _, frames, _ = await frames_of(call, plan)
    assert len({item.content_hash for item in plan.media}) == 1
    for each in (0, 2):
        assert np.array_equal(frames[each], frames[1])
    assert REGISTRY.get_sample_value("framesieve_stage_busy_seconds_count", stage) == count + 1


async def test_a_data_uri_is_as_its_bytes(stub: Any) -> None:
    data = clip(30)
    uri = "data:video/mp4;base64," + base64.b64encode(data).decode()
    call = await asked(stub, prompt_of(prompt_pb2.Part(video=prompt_pb2.Media(url=uri)), video(data)))
    first, second = (await plan_of(call)).media
    assert first.content_hash == second.content_hash


async def test_what_is_fetched_and_is_no_media_is_told_by_its_field(
    tiny_checkpoint: Path, tmp_path: Path, pools: Pools
) -> None:
    async with (
        web_server(ok(b"garbage" * 99)) as server,
        fetching_from(server, tiny_checkpoint, tmp_path, pools) as stub,
    ):
        code, reason, message = await refused(await sent(stub, prompt_of(video(CLIP), by_url(server))))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MEDIA_REJECTED")
    assert message.startswith("prompt.messages[0].parts[1].video")


async def test_one_url_that_fails_closes_the_sources_of_the_others(
    tiny_checkpoint: Path, tmp_path: Path, pools: Pools
) -> None:
    async def gone_once_the_clip_is_there(writer: asyncio.StreamWriter) -> None:
        if "clip.mp4" in server.requests[-1]:
            return writer.write(ok(CLIP))
        assert await settled(lambda: fetched_files(tmp_path) == 2 and server.connections == 2)
        await asyncio.sleep(0.1)
        return writer.write(head(404, "Content-Length: 0"))

    async with (
        web_server(gone_once_the_clip_is_there) as server,
        fetching_from(server, tiny_checkpoint, tmp_path, pools) as stub,
    ):
        code, _, message = await refused(await sent(stub, prompt_of(by_url(server), by_url(server, "/gone"))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith("prompt.messages[0].parts[1].video.url was answered with status 404")


async def test_a_full_disk_is_refused_with_resource_exhausted(
    tiny_checkpoint: Path, tmp_path: Path, pools: Pools
) -> None:
    limits = {"max_bytes": len(CLIP), "disk_bytes": 2 * len(CLIP) - 1}
    async with (
        web_server(ok(CLIP)) as server,
        fetching_from(server, tiny_checkpoint, tmp_path, pools, **limits) as stub,
    ):
        first = await sent(stub, prompt_of(by_url(server)))
        await plan_of(first)
        code, reason, _ = await refused(await sent(stub, prompt_of(by_url(server))))
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        await first.write(EVERYTHING)
        await first.done_writing()
        await read_to_the_end(first)
        assert await settled(lambda: fetched_files(tmp_path) == 0)
        again = await asked(stub, prompt_of(by_url(server)))
        await read_to_the_end(again)


@pytest.mark.parametrize("leaves", ["by cancelling", "by its deadline"])
async def test_a_caller_that_leaves_ends_its_fetches(
    tiny_checkpoint: Path, tmp_path: Path, pools: Pools, leaves: str
) -> None:
    async with web_server(drip) as server, fetching_from(server, tiny_checkpoint, tmp_path, pools) as stub:
        call = stub.Preprocess(timeout=0.5 if leaves == "by its deadline" else 30)
        await call.write(prompt_of(by_url(server), by_url(server)))
        assert await settled(lambda: server.connections == 2 and fetched_files(tmp_path) == 2)
        if leaves == "by cancelling":
            call.cancel()
        assert await settled(lambda: all(task.done() for task in server.serving))
    assert len(server.serving) == 2


@pytest.mark.parametrize("planned", ["well", "and fails"])
async def test_a_caller_that_leaves_while_it_is_planned_leaves_no_source_open(
    tiny_checkpoint: Path, tmp_path: Path, pools: Pools, monkeypatch: pytest.MonkeyPatch, planned: str
) -> None:
    planning, left = threading.Event(), threading.Event()
    plan = Planner.plan

    def late(*arguments: Any) -> Any:
        planning.set()
        left.wait(10)
        return plan(*arguments)

    monkeypatch.setattr(Planner, "plan", late)
    body = clip(4) if planned == "well" else b"garbage"
    async with web_server(ok(body)) as server, fetching_from(server, tiny_checkpoint, tmp_path, pools) as stub:
        call = stub.Preprocess()
        await call.write(prompt_of(by_url(server)))
        assert await settled(planning.is_set)
        call.cancel()
        await asyncio.sleep(0.1)
        assert fetched_files(tmp_path) == 1
        left.set()
        assert await settled(lambda: fetched_files(tmp_path) == 0)
