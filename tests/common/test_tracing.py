"""Spans of requests and stages: what is told, what never is, and that nothing is done where nobody collects it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns

import pytest

from common.contract.errors import MediaRejected
from common.telemetry.otlp import OtlpTracer
from common.telemetry.tracing import Attributes, Metadata, RequestSpan, begin_request, passed_on_trace, record, span
from services.generation.rpc.timing import Stage, StageClock, record_stages
from tests.collector import Span, collecting

ROOT = Path(__file__).parents[2]
METHOD = "/framesieve.v1.EncoderService/Encode"
SECRET = "xyzzy"


@dataclass
class Told:
    """A tracer that keeps what it is told. stages: name, begin, end, error."""

    stages: list[tuple[str, int, int, str | None]] = field(default_factory=list)
    metadata: Metadata = (("traceparent", "of this request"),)

    def begin(self, path: str, metadata: Mapping[str, str | bytes]) -> RequestSpan:
        return self

    def stage(self, name: str, began_ns: int, ended_ns: int, error: str | None, attributes: Attributes) -> None:
        self.stages.append((name, began_ns, ended_ns, error))

    def end(self, code: str, error: str | None, attributes: Attributes) -> None: ...

    def close(self) -> None: ...


def ended(monkeypatch: pytest.MonkeyPatch, *metadata: Mapping[str, str | bytes]) -> list[list[Span]]:
    """For each, the spans of a request that came with it: the request's, one of a stage, one of a stage that failed."""
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
        tracer = OtlpTracer("encoder")
        for each in metadata:
            request = tracer.begin(METHOD, each)
            began_ns = monotonic_ns()
            request.stage("plan", 0, began_ns + 1_000_000, None, {"frames": 8})
            request.stage("decode", began_ns + 9, began_ns, "MEDIA_REJECTED", {})
            time.sleep(0.002)
            request.end("INVALID_ARGUMENT", "MEDIA_REJECTED", {"sent_bytes": 7})
        tracer.close()
        return [collector.spans[place : place + 3] for place in range(0, len(collector.spans), 3)]


def test_a_request_and_its_stages_are_told_with_times_numbers_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    ((plan, decode, request),) = ended(monkeypatch, {})
    assert (request.name, request.service) == ("framesieve.v1.EncoderService/Encode", "framesieve-encoder")
    assert (request.parent_id, plan.parent_id, decode.parent_id) == ("", request.span_id, request.span_id)
    assert plan.trace_id == decode.trace_id == request.trace_id
    assert request.attributes["framesieve.sent_bytes"] == 7
    assert request.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert plan.attributes["framesieve.frames"] == 8
    assert [each.failed for each in (plan, decode, request)] == [False, True, True]
    assert decode.attributes["error.type"] == request.attributes["error.type"] == "MEDIA_REJECTED"
    assert abs(request.end_ns - time.time_ns()) < 60e9
    # What began before its request is told from its request on, and nothing ends before it begins.
    assert plan.start_ns == request.start_ns
    assert plan.within(request)
    assert decode.start_ns == decode.end_ns


def test_a_callers_trace_goes_on_and_what_is_none_begins_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    given = f"00-{trace}-{caller}-01"
    wrong: tuple[str | bytes, ...] = (f"00-{'0' * 32}-{caller}-01", "a" * 8192, "", b"\xff")
    first, *others = ended(monkeypatch, {"traceparent": given}, *({"traceparent": each} for each in wrong))
    assert {each.trace_id for each in first} == {trace}
    assert first[2].parent_id == caller
    traces = {spans[2].trace_id for spans in others}
    assert len(traces) == len(wrong)
    assert trace not in traces
    assert {spans[2].parent_id for spans in others} == {""}


def test_a_caller_that_does_not_sample_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended(monkeypatch, {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}) == []


async def test_stages_belong_to_the_request_whose_task_they_run_in() -> None:
    tracers = [Told(metadata=((str(number), ""),)) for number in range(2)]

    def work() -> None:
        with span("prune"):
            pass

    async def request(tracer: Told) -> Metadata:
        begin_request(tracer, METHOD, {})
        await asyncio.create_task(asyncio.sleep(0))
        await asyncio.create_task(asyncio.to_thread(work))
        return passed_on_trace()

    passed_on = await asyncio.gather(*(asyncio.create_task(request(each)) for each in tracers))
    assert passed_on == [each.metadata for each in tracers]
    assert [[name for name, *_ in each.stages] for each in tracers] == [["prune"], ["prune"]]
    assert passed_on_trace() == ()


async def test_a_stage_that_fails_says_why_without_its_words() -> None:
    tracer = Told()
    begin_request(tracer, METHOD, {})
    for error in (MediaRejected(SECRET), ValueError(SECRET), asyncio.CancelledError()):
        with pytest.raises(type(error)), span("fetch"):
            raise error
    assert [error for *_, error in tracer.stages] == ["MEDIA_REJECTED", "ValueError", "CancelledError"]


def test_outside_of_requests_nothing_is_told() -> None:
    with span("encode", tokens=4):
        record("decode", 0, 1)
    assert passed_on_trace() == ()


async def stages_told(
    *finished: tuple[Stage, int], error: BaseException | None = None
) -> list[tuple[str, int, int, str | None]]:
    """Of a request that began at 0 and is over at 50."""
    tracer, ticks = Told(), iter([0, 50])
    begin_request(tracer, METHOD, {})
    clock = StageClock(lambda: next(ticks))
    for stage, at_ns in finished:
        clock.finish(stage, at_ns) if stage is not Stage.PREFILL else clock.token(at_ns)
    record_stages(clock, error)
    return tracer.stages


async def test_generation_tells_its_own_stages_and_the_one_that_was_cut_short() -> None:
    media = ((Stage.PLAN, 5), (Stage.PRUNE, 10), (Stage.TRANSFER, 12))
    told = [("transfer", 10, 12, None), ("wait_for_prefill", 12, 20, None), ("prefill", 20, 30, None)]
    answered = (*media, (Stage.WAIT_FOR_PREFILL, 20), (Stage.PREFILL, 30), (Stage.PREFILL, 45))
    left = asyncio.CancelledError()
    assert await stages_told(*answered) == [*told, ("generate", 30, 45, None)]
    assert await stages_told(*answered, error=left) == [*told, ("generate", 30, 50, "CancelledError")]
    assert await stages_told(*answered[:4], error=left) == [*told[:2], ("prefill", 20, 50, "CancelledError")]
    assert await stages_told(*media[:2], error=left) == [("transfer", 10, 50, "CancelledError")]
    assert await stages_told(media[0], error=left) == []
    assert await stages_told(error=left) == []


@pytest.mark.parametrize("service", ["preprocessing", "encoder", "generation"])
def test_opentelemetry_is_not_imported_where_nobody_collects_traces(service: str) -> None:
    code = f"""
import sys
import services.{service}.__main__
from common.telemetry.tracing import open_tracer
assert open_tracer("{service}") is None
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    assert output(code) == "[]\n"


def test_a_service_without_the_extra_says_what_is_missing_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None
from common.telemetry.logs import configure_logging
from common.telemetry.tracing import open_tracer
configure_logging("encoder", "json", "info")
print(open_tracer("encoder"))
"""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    told = output(code)
    assert "pip install -e '.[otel]'" in told
    assert told.endswith("None\n")


def test_a_collector_that_is_gone_keeps_nobody_waiting() -> None:
    """In a process of its own, whose exporter goes on trying for ten seconds."""
    told = output(f"""
import os
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:1"
from common.telemetry.tracing import open_tracer
from tests.awake import awake
tracer = open_tracer("encoder")
tracer.begin("{METHOD}", {{}}).end("OK", None, {{}})
with awake() as passed_s:
    tracer.close()
    print("closed in", passed_s(), flush=True)
os._exit(0)
""")
    assert float(told.split("closed in ")[1].split()[0]) < 8


def output(code: str) -> str:
    """What a process prints that runs `code`."""
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout
