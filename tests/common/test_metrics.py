"""Metrics of every service: refusals by reason, and their path. integration/test_metrics.py has the series of each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from prometheus_client import REGISTRY

from gridsieve.common.contract import errors
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
