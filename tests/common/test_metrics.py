"""Metrics of every service: all series from the start, requests by code, refusals by reason, bytes of messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import REGISTRY

from common.checkpoint import Checkpoint
from common.contract import errors
from common.serving.interceptors import RequestInterceptor
from common.telemetry.metrics import age_seconds, begin
from framesieve.v1 import encoder_pb2, encoder_pb2_grpc
from framesieve.v1.encoder_pb2 import EncodeRequest, EncodeResponse, MediaProgress
from tests.common.loopback import eventually

OURS = {error.reason for error in vars(errors).values() if isinstance(error, type) and hasattr(error, "reason")}


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"framesieve_{name}", labels)


class Service(encoder_pb2_grpc.EncoderServiceServicer):
    """Answers each request with one message, or with `error`."""

    error: Exception | None = None

    async def Encode(self, requests: AsyncIterator[EncodeRequest], context: Any) -> AsyncIterator[EncodeResponse]:
        async for _ in requests:
            if self.error:
                raise self.error
            yield EncodeResponse(progress=MediaProgress(decoded_slices=300))


@pytest.fixture
async def asked(tmp_path: Path) -> AsyncIterator[tuple[Service, Any]]:
    service, server = Service(), grpc.aio.server(interceptors=[RequestInterceptor()])
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(service, server)
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/socket") as channel:
        yield service, encoder_pb2_grpc.EncoderServiceStub(channel)
    await server.stop(1)


def test_all_series_of_a_method_exist_from_the_start(tiny_checkpoint: Path) -> None:
    begin("encoder", "Unheard", Checkpoint(tiny_checkpoint), None, "float32", "cpu")
    codes = {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "UNAVAILABLE", "INTERNAL"}
    assert {value("requests_total", method="Unheard", code=code) for code in codes} == {0}
    assert len(OURS) > 8
    assert {value("refusals_total", method="Unheard", reason=reason) for reason in OURS} == {0}
    assert {value("message_bytes_total", method="Unheard", direction=way) for way in ("received", "sent")} == {0}
    assert value("requests_running", method="Unheard") == value("request_seconds_count", method="Unheard") == 0
    fingerprint = Checkpoint(tiny_checkpoint).fingerprint.hex()[:12]
    labels = {"model": tiny_checkpoint.name, "family": "qwen2_5_vl", "fingerprint": fingerprint}
    assert value("model_info", **labels, dtype="float32", device="cpu") == 1


async def test_bytes_of_messages_are_counted_in_both_directions(asked: tuple[Service, Any]) -> None:
    _, stub = asked
    before = [value("message_bytes_total", method="Encode", direction=way) or 0 for way in ("received", "sent")]
    requests = [EncodeRequest(prompt=encoder_pb2.EncodePrompt()), EncodeRequest()]
    answers = [answer async for answer in stub.Encode(iter(requests))]
    after = [value("message_bytes_total", method="Encode", direction=way) or 0 for way in ("received", "sent")]
    sizes = [sum(message.ByteSize() for message in messages) for messages in (requests, answers)]
    assert [now - then for now, then in zip(after, before, strict=True)] == sizes
    assert min(sizes) > 0


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (errors.PromptTooLong("too long"), "INVALID_ARGUMENT", "PROMPT_TOO_LONG"),
        (errors.Overloaded("full"), "RESOURCE_EXHAUSTED", "OVERLOADED"),
        (errors.PeerContract("lies"), "INTERNAL", "PEER_CONTRACT"),
        (ZeroDivisionError("a bug"), "INTERNAL", "INTERNAL"),
    ],
)
async def test_a_refusal_is_counted_once_by_its_reason(
    asked: tuple[Service, Any], error: Exception, code: str, reason: str
) -> None:
    service, stub = asked
    service.error = error
    labels = {"method": "Encode"}
    before = value("requests_total", **labels, code=code) or 0, value("refusals_total", **labels, reason=reason) or 0
    with pytest.raises(grpc.aio.AioRpcError):
        _ = [answer async for answer in stub.Encode(iter([EncodeRequest()]))]
    await eventually(lambda: (value("requests_total", **labels, code=code) or 0) > before[0])
    assert value("requests_total", **labels, code=code) == before[0] + 1
    assert value("refusals_total", **labels, reason=reason) == before[1] + 1


def test_the_age_of_nothing_is_0() -> None:
    assert age_seconds(None) == 0
    assert age_seconds(0) > 0
