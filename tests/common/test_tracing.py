"""Spans of requests and stages: what they carry, what they never carry, and that nothing is exported unasked."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from time import monotonic_ns
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gridsieve.common.contract.errors import MediaRejected
from gridsieve.common.telemetry import tracing
from gridsieve.common.telemetry.tracing import Metadata, RequestSpan, passed_on_trace, record, span
from gridsieve.services.generation.stage_clock import Stage, StageClock, record_stages
from tests.common.guarded_service import METHOD

ROOT = Path(__file__).parents[2]
NAME = METHOD.removeprefix("/")
CALLED = {"rpc.system.name": "grpc", "rpc.method": NAME}
SECRET = "xyzzy"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The spans that have ended, in that order."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_TRACER", provider.get_tracer("tests"))
    return exporter


def error_of(ended: ReadableSpan) -> object:
    assert ended.status.is_ok == ("error.type" not in (ended.attributes or {}))
    return (ended.attributes or {}).get("error.type")


async def test_a_request_and_its_stages_carry_times_numbers_and_reasons(spans: InMemorySpanExporter) -> None:
    request = RequestSpan(NAME, CALLED, {})
    began_ns = monotonic_ns()
    record("plan", 0, began_ns + 1_000_000, frames=8)
    record("decode", began_ns + 9, began_ns, MediaRejected(SECRET))
    await asyncio.sleep(0.002)
    request.end("INVALID_ARGUMENT", "MEDIA_REJECTED", {"sent_bytes": 7})
    plan, decode, ended = spans.get_finished_spans()
    assert plan.parent == decode.parent == ended.context
    assert dict(ended.attributes or {}) == {
        "rpc.system.name": "grpc",
        "rpc.method": ended.name,
        "rpc.response.status_code": "INVALID_ARGUMENT",
        "gridsieve.request_id": "",
        "gridsieve.sent_bytes": 7,
        "error.type": "MEDIA_REJECTED",
    }
    assert (plan.attributes or {})["gridsieve.frames"] == 8
    assert [error_of(each) for each in (plan, decode, ended)] == [None, "MEDIA_REJECTED", "MEDIA_REJECTED"]
    assert abs(ended.end_time - time.time_ns()) < 60e9  # type: ignore[operator]
    # A stage that began before its request starts with the request, and no stage ends before it starts.
    assert plan.start_time == ended.start_time
    assert plan.end_time <= ended.end_time  # type: ignore[operator]
    assert decode.start_time == decode.end_time


async def test_a_valid_traceparent_is_continued_and_an_invalid_one_ignored(spans: InMemorySpanExporter) -> None:
    RequestSpan(NAME, CALLED, {"traceparent": f"00-{TRACE}-{CALLER}-01"}).end("OK", None, {})
    ((_, passed_on),) = passed_on_trace()
    RequestSpan(NAME, CALLED, {"traceparent": b"\xff"}).end("OK", None, {})
    continued, new = spans.get_finished_spans()
    assert continued.parent is not None
    assert (f"{continued.context.trace_id:x}", f"{continued.parent.span_id:x}") == (TRACE.lstrip("0"), CALLER)
    assert passed_on == f"00-{TRACE}-{continued.context.span_id:016x}-01"
    assert new.parent is None
    assert new.context.trace_id != continued.context.trace_id


async def test_stages_belong_to_the_request_whose_task_they_run_in(spans: InMemorySpanExporter) -> None:
    def work() -> None:
        with span("prune"):
            pass

    async def run() -> tuple[RequestSpan, Metadata]:
        request = RequestSpan(NAME, CALLED, {})
        await asyncio.sleep(0)
        await asyncio.create_task(asyncio.to_thread(work))
        request.end("OK", None, {})
        return request, passed_on_trace()

    await asyncio.gather(asyncio.create_task(run()), asyncio.create_task(run()))
    ended = spans.get_finished_spans()
    stages = {each.parent.span_id for each in ended if each.name == "prune" and each.parent}
    assert stages == {each.context.span_id for each in ended if each.name != "prune"}
    assert len(stages) == 2


async def test_generation_records_its_stages_and_the_one_that_was_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(*finished: tuple[Stage, int], error: BaseException | None = None) -> list[tuple[object, ...]]:
        """name, begin, end and error of each stage of a request that began at 0 and ended at 50."""
        stages, ticks = list[tuple[object, ...]](), iter([0, 50])
        monkeypatch.setattr(RequestSpan, "stage", lambda _, *stage: stages.append(stage[:4]))
        RequestSpan(NAME, CALLED, {})
        clock = StageClock(lambda: next(ticks))
        for stage, at_ns in finished:
            clock.finish(stage, at_ns) if stage is not Stage.PREFILL else clock.token(at_ns)
        record_stages(clock, error)
        return stages

    media = ((Stage.PLAN, 5), (Stage.PRUNE, 10), (Stage.TRANSFER, 12))
    answered = (*media, (Stage.WAIT_FOR_PREFILL, 20), (Stage.PREFILL, 30), (Stage.PREFILL, 45))
    stages = [("transfer", 10, 12, None), ("wait_for_prefill", 12, 20, None), ("prefill", 20, 30, None)]
    left = asyncio.CancelledError()
    assert recorded(*answered) == [*stages, ("generate", 30, 45, None)]
    assert recorded(*answered, error=left) == [*stages, ("generate", 30, 50, "CancelledError")]
    assert recorded(*answered[:4], error=left) == [*stages[:2], ("prefill", 20, 50, "CancelledError")]
    assert recorded(*media[:2], error=left) == [("transfer", 10, 50, "CancelledError")]
    assert recorded(media[0], error=left) == recorded(error=left) == []


def test_the_sdk_is_imported_for_an_endpoint_only_and_may_be_missing() -> None:
    printed = output("""
import os, sys
from gridsieve.common.telemetry.logs import configure_logging
import gridsieve.common.serving.server
from gridsieve.common.telemetry.otlp import export_spans
configure_logging("encoder", "json", "info")
export_spans("encoder")()
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
sys.modules["opentelemetry.sdk"] = None
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:4317"
export_spans("encoder")()
""")
    assert printed.startswith("[]\n")
    assert "pip install 'gridsieve[otel]'" in printed


def test_an_unreachable_collector_delays_the_exit_by_two_seconds_at_most() -> None:
    """In a process of its own, because the exporter retries for ten seconds."""
    printed = output(f"""
import os
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:1"
from gridsieve.common.telemetry.otlp import export_spans
from gridsieve.common.telemetry.tracing import RequestSpan
from tests.awake import awake
close = export_spans("encoder")
RequestSpan("{METHOD}", {{}}, {{}}).end("OK", None, {{}})
with awake() as passed_s:
    close()
    print("closed in", passed_s(), flush=True)
os._exit(0)
""")
    assert float(printed.split("closed in ")[1].split()[0]) < 8


def output(code: str) -> str:
    """Output of a process that runs `code`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, timeout=90, **pipes)
    assert ran.returncode == 0, ran.stdout
    return str(ran.stdout)
