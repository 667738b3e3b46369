"""Generate over gRPC with a real engine: order of responses, statuses, and release of resources."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import structlog
import torch

from common.channels import REQUEST_ID_KEY
from common.contract.errors import MediaDamaged
from framesieve.v1 import generation_pb2, prompt_pb2
from framesieve.v1.generation_pb2 import GenerateRequest, Sampling
from services.generation.request.batch import Window
from services.generation.request.encoded_media import MediaItem
from services.generation.request.request import Request
from tests.generation.generation_peers import embeds_messages, eventually, prompt_message
from tests.generation.generation_service import (
    HALF,
    HIDDEN,
    KEPT,
    LIMIT,
    ROOM_BYTES,
    TEXT_AFTER,
    TEXT_BEFORE,
    VIDEO,
    Service,
    answers,
    refused,
    service_of,
    token_ids,
    video_items,
)


async def test_responses_are_accepted_then_progress_then_tokens_then_finished(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        responses = await answers(service.ask(request_id="mine-7", sampling=Sampling(max_new_tokens=5, logprobs=True)))
        await eventually(service.idle)
    kinds = [response.WhichOneof("response") for response in responses]
    assert kinds == ["accepted", "progress", *["delta"] * 5, "finished"]
    accepted, finished = responses[0].accepted, responses[-1].finished
    assert accepted.request_id == "mine-7"
    assert service.encoder.metadata[0][REQUEST_ID_KEY] == "mine-7"
    full = TEXT_BEFORE + VIDEO[1].tokens + TEXT_AFTER
    for usage, completion, repaired in ((accepted.usage, 0, 0), (finished.usage, 5, 2)):
        assert (usage.prompt_tokens_full, usage.prompt_tokens) == (full, full - 12)
        assert usage.completion_tokens == completion
        [media] = usage.media
        assert (media.kept_tokens, media.repaired_frames, media.first_slice_only) == (12, repaired, False)
        assert (media.grid.t, media.grid.h, media.grid.w) == (4, 2, 3)
    assert finished.reason == generation_pb2.FINISH_REASON_LENGTH
    assert all(len(response.delta.logprobs) == 1 and response.delta.logprobs[0] < 0 for response in responses[2:-1])


async def test_stages_sum_to_the_time_to_first_token(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        for call in (service.ask(), service.ask_text()):
            timings = (await answers(call))[-1].finished.timings
            stages = [
                timings.fetch_s,
                timings.plan_s,
                timings.decode_s,
                timings.resize_s,
                timings.wait_for_encoder_s,
                timings.encode_s,
                timings.prune_s,
                timings.transfer_s,
                timings.wait_for_prefill_s,
                timings.prefill_s,
            ]
            assert sum(stages) == pytest.approx(timings.time_to_first_token_s, abs=1e-9)
            assert min(stages) >= 0
            assert min(timings.plan_s, timings.prefill_s, timings.generate_s) > 0
    assert timings.decode_s == timings.encode_s == timings.transfer_s == 0  # the second prompt had no media


async def test_text_before_a_video_is_prefilled_while_the_video_is_encoded(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    hold = asyncio.Event()
    async with service_of(tmp_path, tiny_checkpoint, hold=hold) as service:
        call = service.ask()
        await eventually(lambda: service.engine.stats().totals.tokens == TEXT_BEFORE)
        assert len(token_ids(await answers(service.ask_text()))) == 5  # other requests run in the meantime
        hold.set()
        assert len(token_ids(await answers(call))) == 5


async def test_invalid_requests_are_refused_and_the_next_one_is_served(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        for request_id in ("x" * 129, "a\nb"):
            code, reason, message = await refused(service.ask(request_id=request_id))
            assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
            assert "request_id must be at most 128 printable ASCII characters" in message
        prompt = prompt_message(service.encoder.plan)
        for pruning in (prompt_pb2.Pruning(rate=1.0), prompt_pb2.Pruning(method="best")):
            call = service.stub.Generate(GenerateRequest(prompt=prompt, pruning=pruning))
            assert (await refused(call))[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert service.encoder.metadata == []
        code, reason, message = await refused(service.ask(sampling=Sampling(max_new_tokens=LIMIT - 20)))
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
        assert "max_pixels=" in message
        assert service.encoder.selections in ([], [[]])
        await eventually(service.idle)
        assert len(token_ids(await answers(service.ask()))) == 5
        service.room.size_bytes = 100
        code, reason, message = await refused(service.ask())
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
        assert f"{len(KEPT) * HIDDEN * 4} bytes; --media-buffer-bytes holds 100" in message


async def test_a_peers_violation_is_internal_without_details(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint, items=video_items()[:-1]) as service:
        code, reason, message = await refused(service.ask())
        assert (code, reason) == (grpc.StatusCode.INTERNAL, "PEER_CONTRACT")
        assert "stream ended" not in message
        await eventually(service.idle)
        service.encoder.items = video_items()
        assert len(token_ids(await answers(service.ask()))) == 5


async def test_upstream_errors_reach_the_caller(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint, fault=MediaDamaged("9 of 10 frames are broken")) as service:
        refusal = await refused(service.ask())
        assert refusal == (grpc.StatusCode.INVALID_ARGUMENT, "MEDIA_DAMAGED", "9 of 10 frames are broken")
        await eventually(service.idle)


async def test_a_client_that_disconnects_or_times_out_during_encoding_leaves_nothing(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    async with service_of(tmp_path, tiny_checkpoint, hold=asyncio.Event()) as service:
        call = service.ask()
        assert (await call.read()).HasField("accepted")
        await eventually(lambda: service.encoder.selections == [[0]] and service.engine.stats().blocks_used > 0)
        call.cancel()
        await eventually(lambda: service.idle() and service.encoder.cancelled == 1)
        request = GenerateRequest(prompt=prompt_message(service.encoder.plan), pruning=HALF)
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await answers(service.stub.Generate(request, timeout=0.5))
        assert info.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: service.idle() and service.encoder.cancelled == 2)


async def test_a_client_that_disconnects_while_waiting_for_bytes_reserves_none(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        async with service.room.reserved(ROOM_BYTES):
            call = service.ask()
            await eventually(lambda: service.engine.stats().awaiting_media == 1)
            call.cancel()
            await eventually(lambda: service.engine.stats().awaiting_media == 0)
        await eventually(service.idle)
        assert len(token_ids(await answers(service.ask()))) == 5
        assert service.encoder.selections == [[], [0]]


async def test_a_client_that_disconnects_while_tokens_stream_leaves_nothing(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    gc.disable()  # resources must be freed without the garbage collector
    try:
        async with service_of(tmp_path, tiny_checkpoint) as service:
            run = service.engine._runner.run

            def slowly(windows: Sequence[Window]) -> Any:  # so that the answer cannot finish before the client leaves
                time.sleep(0.02)
                return run(windows)

            service.engine._runner.run = slowly  # type: ignore[method-assign]
            call = service.ask_text(sampling=Sampling(max_new_tokens=200))
            while not (await call.read()).HasField("delta"):
                pass
            await eventually(lambda: not service.idle())
            call.cancel()
            await eventually(service.idle)
            assert service.engine.stats().totals.tokens < 200
    finally:
        gc.enable()


async def test_a_client_that_stops_reading_delays_no_other(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        idle_reader = service.ask_text(sampling=Sampling(max_new_tokens=200))
        await idle_reader.read()
        assert len(token_ids(await answers(service.ask()))) == 5
        assert len(token_ids(await answers(idle_reader))) == 200


class Caller:
    """The context of a call made directly, whose responses can be read arbitrarily slowly."""

    def time_remaining(self) -> None:
        return None


def video_request(service: Service, new_tokens: int) -> GenerateRequest:
    request = GenerateRequest(
        prompt=prompt_message(service.encoder.plan), sampling=Sampling(max_new_tokens=new_tokens), pruning=HALF
    )
    structlog.contextvars.bind_contextvars(request_id="direct")
    return request


async def test_a_client_that_stops_reading_holds_no_bytes_of_media(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        request = video_request(service, 5)
        async with aclosing(service.servicer.Generate(request, Caller())) as responses:
            assert (await anext(responses)).HasField("accepted")
            async with asyncio.timeout(10):
                while not service.room.held_bytes:
                    await asyncio.sleep(0)
                while service.room.held_bytes:
                    await asyncio.sleep(0.01)
            left = [response async for response in responses]
        assert len(token_ids(left)) == 5
        assert left[-1].HasField("finished")


async def test_inline_media_and_embeddings_are_freed_once_delivered(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        request = video_request(service, 9)
        messages = [request, request.prompt, request.pruning]
        before = [sys.getrefcount(each) for each in messages]
        delivered: list[weakref.ref[torch.Tensor]] = []
        deliver = service.engine.deliver

        def note(question: Request, item: MediaItem) -> None:
            delivered.append(weakref.ref(item.embeds))
            deliver(question, replace(item, embeds=item.embeds.clone()))

        service.engine.deliver = note  # type: ignore[method-assign]
        async with aclosing(service.servicer.Generate(request, Caller())) as responses:
            while not (await anext(responses)).HasField("delta"):
                pass
            await eventually(lambda: [sys.getrefcount(each) for each in messages] == before)
            assert [embeds() for embeds in delivered] == [None]


async def test_usage_reports_a_rate_that_keeps_only_the_first_slice(tmp_path: Path, tiny_checkpoint: Path) -> None:
    embeds = np.ones((1, 6, HIDDEN), np.float32)
    async with service_of(tmp_path, tiny_checkpoint, items=embeds_messages(0, embeds, range(6))) as service:
        prompt = prompt_message(service.encoder.plan)
        # At this rate each method keeps six tokens, but only EVS those of the first slice.
        for method, expected in (("evs", True), ("vidcom2", False), ("random", False)):
            pruning = prompt_pb2.Pruning(rate=0.75, method=method)
            request = GenerateRequest(prompt=prompt, pruning=pruning, sampling=Sampling(max_new_tokens=1))
            responses = await answers(service.stub.Generate(request))
            assert [each.first_slice_only for each in responses[0].accepted.usage.media] == [expected]
