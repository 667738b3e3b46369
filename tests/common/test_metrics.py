"""Metrics of every service: all series from the start, requests by code, refusals by reason, bytes of messages."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from prometheus_client import REGISTRY

from framesieve.common.checkpoint import Checkpoint
from framesieve.common.contract import errors
from framesieve.common.process import free_port
from framesieve.common.serving.guards import serve_metrics
from framesieve.common.serving.settings import ServiceSettings
from framesieve.common.telemetry.metrics import begin
from framesieve.v1.encoder_pb2 import EncodeResponse
from tests.common.guarded_service import Echo, ask, refusal
from tests.common.loopback import eventually, serving

OURS = {error.reason for error in vars(errors).values() if isinstance(error, type) and hasattr(error, "reason")}


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"framesieve_{name}", labels)


def test_all_series_of_a_method_exist_from_the_start(tiny_checkpoint: Path) -> None:
    begin("encoder", "Unheard", Checkpoint(tiny_checkpoint), (), "float32", "cpu")
    codes = {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "UNAVAILABLE", "INTERNAL"}
    assert {value("requests_total", method="Unheard", code=code) for code in codes} == {0}
    assert len(OURS) > 8
    assert {value("refusals_total", method="Unheard", reason=reason) for reason in OURS} == {0}
    assert {value("message_bytes_total", method="Unheard", direction=way) for way in ("received", "sent")} == {0}
    assert value("requests_running", method="Unheard") == value("request_seconds_count", method="Unheard") == 0
    fingerprint = Checkpoint(tiny_checkpoint).fingerprint.hex()[:12]
    labels = {"model": tiny_checkpoint.name, "family": "qwen2_5_vl", "fingerprint": fingerprint}
    assert value("model_info", **labels, dtype="float32", device="cpu") == 1


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (errors.PromptTooLong("too long"), "INVALID_ARGUMENT", "PROMPT_TOO_LONG"),
        (errors.PeerContract("lies"), "INTERNAL", "PEER_CONTRACT"),
        (ZeroDivisionError("a bug"), "INTERNAL", "INTERNAL"),
    ],
)
async def test_a_refusal_is_counted_once_by_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str, reason: str
) -> None:
    async def fails(*_: object) -> AsyncIterator[EncodeResponse]:
        raise error
        yield

    def counted() -> tuple[float, float]:
        requests = value("requests_total", method="Encode", code=code) or 0
        return requests, value("refusals_total", method="Encode", reason=reason) or 0

    requests, refusals = counted()
    monkeypatch.setattr(Echo, "Encode", fails)
    async with serving(f"unix:{tmp_path}/s", Echo()) as channel:
        assert (await refusal(ask(channel)))[0] is grpc.StatusCode[code]
        await eventually(lambda: counted()[0] > requests)
    assert counted() == (requests + 1, refusals + 1)


def test_metrics_are_at_their_path_alone_and_name_the_model_as_it_is_served(tiny_checkpoint: Path) -> None:
    begin("encoder", "Unheard", Checkpoint(tiny_checkpoint), ("traffic-7b",))
    port = free_port()
    serve_metrics(ServiceSettings(listen="127.0.0.1:1", metrics_port=port))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        assert 'framesieve_model_info{device="",dtype="",family="qwen2_5_vl"' in (text := answer.read().decode())
    assert 'model="traffic-7b"' in text
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20)
    refused.value.close()
