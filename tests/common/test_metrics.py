"""Metrics of every service: refusals by reason, and their path. integration/test_metrics.py has the series of each."""

from __future__ import annotations

import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from prometheus_client import REGISTRY

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract import errors
from gridsieve.common.process import free_port
from gridsieve.common.serving.guards import serve_metrics
from gridsieve.common.serving.settings import ServiceSettings
from gridsieve.common.telemetry.metrics import begin
from gridsieve.v1.encoder_pb2 import EncodeResponse
from tests.common.guarded_service import Echo, ask, refusal
from tests.common.loopback import eventually, serving


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"gridsieve_{name}", labels)


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


def test_metrics_name_the_model(tiny_checkpoint: Path) -> None:
    begin("encoder", "Unheard", Checkpoint(tiny_checkpoint), ("traffic-7b",))
    port = free_port()
    serve_metrics(ServiceSettings(listen="127.0.0.1:1", metrics_port=port))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        assert 'gridsieve_model_info{device="",dtype="",family="qwen2_5_vl"' in (text := answer.read().decode())
    assert 'model="traffic-7b"' in text
