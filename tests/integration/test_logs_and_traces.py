"""One question is one line in the log of each service and one trace through all three."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from gridsieve.client.messages import generate_request
from gridsieve.client.prompt import Options, Video, user_turn
from gridsieve.common.channels import REQUEST_ID_KEY, open_channel
from gridsieve.v1 import generation_pb2
from gridsieve.v1.generation_pb2_grpc import GenerationServiceStub
from tests import media
from tests.integration.collector import Collector, Span
from tests.integration.fleet import Stack, until
from tests.integration.gateway import gateway
from tests.integration.gateway import question as http_question
from tests.preprocessing.media_server import head, ok, serving

SECRET = "xyzzy"
# At most this much time passes between two processes reading their clocks on a busy machine.
CLOCKS_NS = 200_000_000
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
METHODS = {"generation": "Generate", "encoder": "Encode", "preprocessing": "Preprocess"}
# The spans of each service for a question about an uncached video that comes by URL.
STAGES = {
    "generation": ["transfer", "wait_for_prefill", "prefill", "generate"],
    "encoder": ["wait_for_encoder", "encode", "prune"],
    "preprocessing": ["fetch", "plan", "decode", "resize"],
}


@pytest.fixture
async def stub(stack: Stack) -> AsyncIterator[GenerationServiceStub]:
    async with open_channel(stack.address) as channel:
        yield GenerationServiceStub(channel)


def question(video: Video, rate: float = 0.5, adapter: str | None = None) -> generation_pb2.GenerateRequest:
    # Enough tokens that both upstream calls end before generation does.
    pruned: Options = {"pruning_rate": rate, "pruning_method": "evs"}
    options: Options = {**pruned, "max_new_tokens": 64, "ignore_eos": True, "adapter": adapter}
    return generate_request([user_turn(video, f"Where is {SECRET}?")], options)


def secret_url(port: int) -> Video:
    return Video(url=f"http://localhost:{port}/{SECRET}.mp4?key={SECRET}")


def called(request_id: str) -> dict[str, Any]:
    """Call options with a request id and a trace context of the caller."""
    trace = ("traceparent", f"00-{TRACE}-{CALLER}-01")
    return {"metadata": ((REQUEST_ID_KEY, request_id), trace), "timeout": 60}


async def ended(stack: Stack, request_id: str) -> dict[str, dict[str, Any]]:
    """The line that each service logs at the end of a request, once all have."""

    def found() -> dict[str, dict[str, Any]]:
        lines = [json.loads(line) for service in METHODS for line in stack.log(service).splitlines()]
        own = [each for each in lines if each.get("request_id") == request_id and each["event"] == "request ended"]
        assert len({each["service"] for each in own}) == len(own)
        return {each["service"]: each for each in own}

    await until(lambda: len(found()) == len(METHODS))
    return found()


async def spans_of(collector: Collector, request_id: str, stages: dict[str, list[str]]) -> dict[str, list[Span]]:
    """The spans of a request by service: that of the service, then those of these stages by start."""
    await until(lambda: len(collector.of_request(request_id)) >= len(METHODS) + sum(map(len, stages.values())))
    arrived = collector.of_request(request_id)
    found = {service: [span for span in arrived if span.service == service] for service in METHODS}
    for service, spans in found.items():
        request = f"gridsieve.v1.{service.capitalize()}Service/{METHODS[service]}"
        assert sorted(span.name for span in spans) == sorted([*stages[service], request])
        spans.sort(key=lambda span: span.name != request)
    return found


async def test_a_question_is_one_line_in_each_log_and_one_trace(
    stack: Stack, stub: GenerationServiceStub, collector: Collector, fetch_port: int
) -> None:
    async with serving(ok(media.clip(16, fps=4, seed=81)), port=fetch_port):
        asked = question(secret_url(fetch_port), adapter="large")
        answer = [response async for response in stub.Generate(asked, **called("seen-1"))]
    usage, timings = answer[-1].finished.usage, answer[-1].finished.timings

    logged = await ended(stack, "seen-1")
    for service, line in logged.items():
        assert (line["method"], line["code"], line["level"]) == (METHODS[service], "OK", "info")
        assert 0 < line["seconds"] < 60
        assert line["sent_bytes"] > 0
    assert logged["preprocessing"]["frames"] == 8
    assert (logged["encoder"]["media_tokens_full"], logged["encoder"]["media_tokens"]) == (64, 32)
    # Frames of 112 × 112 pixels, and 64 values of float32 for each kept token, in shared memory.
    assert logged["preprocessing"]["handed_over_bytes"] == 8 * 112 * 112 * 3
    assert logged["encoder"]["handed_over_bytes"] == 32 * 64 * 4
    for name in ("prompt_tokens_full", "prompt_tokens", "completion_tokens"):
        assert logged["generation"][name] == getattr(usage, name)
    assert logged["generation"]["first_token_ms"] == int(timings.time_to_first_token_s * 1000)
    assert logged["generation"]["adapter"] == "large"

    spans = await spans_of(collector, "seen-1", STAGES)
    parent_id, above = CALLER, None
    for service in METHODS:
        request, *own = spans[service]
        assert (request.trace_id, request.parent_id) == (TRACE, parent_id)
        assert above is None or request.within(above, CLOCKS_NS)
        assert all(span.parent_id == request.span_id and span.within(request) for span in own)
        assert not any(span.failed for span in spans[service])
        parent_id, above = request.span_id, request
    prune = next(span for span in spans["encoder"] if span.name == "prune").attributes
    expected = {"method": "evs", "rate": 0.5, "media_tokens_full": 64, "media_tokens": 32}
    assert {name: prune[f"gridsieve.{name}"] for name in expected} == expected
    # Stages of generation are contiguous and as long as the answer says.
    request, *own = spans["generation"]
    assert [span.name for span in own] == STAGES["generation"]
    assert all(one.end_ns == other.start_ns for one, other in pairwise(own))
    for span in own:
        assert (span.end_ns - span.start_ns) * 1e-9 == pytest.approx(getattr(timings, f"{span.name}_s"), abs=1e-6)
    assert request.attributes["gridsieve.completion_tokens"] == usage.completion_tokens


async def test_the_gateway_is_a_span_above_generation(
    stack: Stack, collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    body = http_question("Why?", user="ann")
    headers = {"x-request-id": "seen-2", "traceparent": f"00-{TRACE}-{CALLER}-01"}
    with gateway(stack.address, tmp_path) as door:
        async with httpx.AsyncClient(base_url=door.url, timeout=60) as client:
            answer = await client.post("/v1/chat/completions", json=body, headers=headers)
        await until(lambda: {"gateway", "generation"} <= {span.service for span in collector.of_request("seen-2")})
        (logged,) = [json.loads(line) for line in door.log.read_text().splitlines() if "seen-2" in line]
    assert answer.headers["x-request-id"] == "seen-2"
    spans = collector.of_request("seen-2")
    (above,) = [span for span in spans if span.service == "gateway"]
    below = next(span for span in spans if span.name.endswith("/Generate"))
    assert (above.name, above.trace_id, above.parent_id) == ("POST /v1/chat/completions", TRACE, CALLER)
    assert (below.trace_id, below.parent_id) == (TRACE, above.span_id)
    assert (logged["user"], logged["code"]) == ("ann", "OK")


async def test_cache_hits_leave_out_the_spans_of_the_work_they_save(
    stack: Stack, stub: GenerationServiceStub, collector: Collector
) -> None:
    video = Video(data=media.clip(16, fps=4, seed=83))
    own = {"preprocessing": ["plan"], "encoder": ["prune"], "generation": STAGES["generation"]}
    asked = {
        "new": STAGES | {"preprocessing": ["plan", "decode", "resize"]},
        "another rate": own,
        "again": own | {"encoder": [], "generation": STAGES["generation"][1:]},
    }
    for (name, stages), rate in zip(asked.items(), (0.5, 0.25, 0.25), strict=True):
        async for _ in stub.Generate(question(video, rate), **called(name)):
            pass
        await spans_of(collector, name, stages)
    assert (await ended(stack, "another rate"))["encoder"]["cached_media"] == 1
    assert (await ended(stack, "again"))["generation"]["cached_prompt_tokens"] > 0


async def test_a_refusal_is_a_warning_in_each_log_and_a_failed_span_in_each_service(
    stack: Stack, stub: GenerationServiceStub, collector: Collector, fetch_port: int
) -> None:
    async with serving(head(404, "Content-Length: 0"), port=fetch_port):
        with pytest.raises(grpc.aio.AioRpcError):
            [response async for response in stub.Generate(question(secret_url(fetch_port)), **called("refused-1"))]
    for line in (await ended(stack, "refused-1")).values():
        assert (line["level"], line["code"], line["reason"]) == ("warning", "INVALID_ARGUMENT", "MEDIA_REJECTED")
        assert "was answered with status 404" in line["error"]
    spans = await spans_of(collector, "refused-1", {"generation": [], "encoder": [], "preprocessing": ["fetch"]})
    for span in (span for own in spans.values() for span in own):
        assert span.failed
        assert span.attributes["error.type"] == "MEDIA_REJECTED"


async def test_neither_logs_nor_traces_contain_prompts_or_urls(
    stack: Stack, stub: GenerationServiceStub, collector: Collector, fetch_port: int
) -> None:
    """Nor do those of the tests above, which ask with the same secret."""
    password = Video(url=f"http://user:{SECRET}@localhost:{fetch_port}/clip.mp4")
    with pytest.raises(grpc.aio.AioRpcError):
        [response async for response in stub.Generate(question(password), **called("password"))]
    assert {line["code"] for line in (await ended(stack, "password")).values()} == {"INVALID_ARGUMENT"}
    assert not [service for service in METHODS if SECRET in stack.log(service)]
    assert collector.spans
    assert SECRET.encode() not in collector.sent
