"""One question is one line in the log of each service and one trace through all three."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import grpc
import pytest

from common.channels import REQUEST_ID_KEY, open_channel
from framesieve.cli.launcher import LocalStack
from framesieve.client.messages import generate_request
from framesieve.client.prompt import Options, Video, user_turn
from framesieve.v1 import generation_pb2
from framesieve.v1.generation_pb2_grpc import GenerationServiceStub
from tests import media
from tests.collector import Collector, Span
from tests.integration.conftest import settles
from tests.preprocessing.media_server import head, ok, serving

SECRET = "xyzzy"
# At most this much time passes between two processes reading their clocks on a busy machine.
CLOCKS_NS = 200_000_000
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
# The spans of each service for a question about an uncached video.
STAGES = {
    "framesieve-generation": ["transfer", "wait_for_prefill", "prefill", "generate"],
    "framesieve-encoder": ["wait_for_encoder", "encode", "prune"],
    "framesieve-preprocessing": ["fetch", "plan", "decode", "resize"],
}
REQUESTS = {
    "framesieve-generation": "framesieve.v1.GenerationService/Generate",
    "framesieve-encoder": "framesieve.v1.EncoderService/Encode",
    "framesieve-preprocessing": "framesieve.v1.PreprocessingService/Preprocess",
}
METHODS = {"generation": "Generate", "encoder": "Encode", "preprocessing": "Preprocess"}


@pytest.fixture
async def stub(stack: LocalStack) -> AsyncIterator[GenerationServiceStub]:
    async with open_channel(stack.address) as channel:
        yield GenerationServiceStub(channel)


def question(video: Video, rate: float = 0.5) -> generation_pb2.GenerateRequest:
    # Enough tokens that both upstream calls end before generation does.
    options: Options = {"pruning_rate": rate, "max_new_tokens": 64, "ignore_eos": True}
    return generate_request([user_turn(video, f"Where is {SECRET}?")], options)


def called(request_id: str) -> dict[str, Any]:
    """Call options with a request id and a trace context of the caller."""
    trace = ("traceparent", f"00-{TRACE}-{CALLER}-01")
    return {"metadata": ((REQUEST_ID_KEY, request_id), trace), "timeout": 60}


def lines(stack: LocalStack, service: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stack.log(service).splitlines()]


async def ended(stack: LocalStack, request_id: str) -> dict[str, dict[str, Any]]:
    """The line that each service logs at the end of a request, once all have."""

    def found() -> dict[str, list[dict[str, Any]]]:
        each = {service: lines(stack, service) for service in METHODS}
        return {
            service: [line for line in own if line.get("request_id") == request_id and line["event"] == "request ended"]
            for service, own in each.items()
        }

    assert await settles(lambda: sum(map(len, found().values())), len(METHODS), within_s=20)
    return {service: own[0] for service, own in found().items()}


async def spans_of(collector: Collector, request_id: str, count: int) -> dict[str, list[Span]]:
    """The spans of a request by service, in the order of their starts, once `count` have arrived."""
    await settles(lambda: len(collector.of_request(request_id)), count, within_s=20)
    spans = collector.of_request(request_id)
    assert len(spans) == count, [(span.service, span.name) for span in spans]
    return {service: [span for span in spans if span.service == service] for service in STAGES}


def request_span(spans: dict[str, list[Span]], service: str) -> Span:
    (found,) = (span for span in spans[service] if span.name == REQUESTS[service])
    return found


async def test_a_question_is_one_line_in_each_log_and_one_trace(
    stack: LocalStack, stub: GenerationServiceStub, collector: Collector, fetch_port: int
) -> None:
    clip = media.clip(16, fps=4, seed=81)
    async with serving(ok(clip), port=fetch_port):
        asked = question(Video(url=f"http://localhost:{fetch_port}/{SECRET}.mp4?key={SECRET}"))
        answer = [response async for response in stub.Generate(asked, **called("seen-1"))]
    usage = answer[-1].finished.usage

    logged = await ended(stack, "seen-1")
    for service, line in logged.items():
        assert (line["service"], line["method"], line["code"]) == (service, METHODS[service], "OK")
        assert line["level"] == "info"
        assert 0 < line["seconds"] < 60
        assert line["sent_bytes"] > 0
    assert logged["preprocessing"]["frames"] == 8
    assert logged["encoder"]["media_tokens_full"] == 64
    assert logged["encoder"]["media_tokens"] == 32
    for name in ("prompt_tokens_full", "prompt_tokens", "completion_tokens"):
        assert logged["generation"][name] == getattr(usage, name)
    took_s = answer[-1].finished.timings.time_to_first_token_s
    assert logged["generation"]["first_token_ms"] == int(took_s * 1000) < logged["generation"]["seconds"] * 1000
    assert logged["preprocessing"]["prompt_tokens_full"] == usage.prompt_tokens_full

    spans = await spans_of(collector, "seen-1", len(REQUESTS) + sum(map(len, STAGES.values())))
    parent_id, above = CALLER, None
    for service, stages in STAGES.items():
        request = request_span(spans, service)
        assert (request.trace_id, request.parent_id) == (TRACE, parent_id)
        assert above is None or request.within(above, CLOCKS_NS)
        own = [span for span in spans[service] if span is not request]
        assert sorted(span.name for span in own) == sorted(stages)
        assert all(span.parent_id == request.span_id and span.within(request) for span in own)
        assert not any(span.failed for span in spans[service])
        parent_id, above = request.span_id, request
    prune = next(span for span in spans["framesieve-encoder"] if span.name == "prune")
    assert prune.attributes["framesieve.method"] == "evs"
    assert prune.attributes["framesieve.rate"] == 0.5
    assert (prune.attributes["framesieve.media_tokens_full"], prune.attributes["framesieve.media_tokens"]) == (64, 32)
    generate = request_span(spans, "framesieve-generation").attributes
    assert generate["framesieve.completion_tokens"] == usage.completion_tokens
    assert generate["rpc.response.status_code"] == "OK"


async def test_spans_are_contiguous_and_as_long_as_the_timings_of_the_answer(
    stub: GenerationServiceStub, collector: Collector
) -> None:
    asked = question(Video(data=media.clip(16, fps=4, seed=82)))
    answer = [response async for response in stub.Generate(asked, **called("seen-2"))]
    timings = answer[-1].finished.timings
    spans = await spans_of(collector, "seen-2", len(REQUESTS) + sum(map(len, STAGES.values())) - len(["fetch"]))
    own = {span.name: span for span in spans["framesieve-generation"]}
    ordered = [own[name] for name in STAGES["framesieve-generation"]]
    assert all(one.end_ns == other.start_ns for one, other in pairwise(ordered))
    for name in STAGES["framesieve-generation"]:
        took_s = (own[name].end_ns - own[name].start_ns) * 1e-9
        assert took_s == pytest.approx(getattr(timings, f"{name}_s"), abs=1e-6)
    request = request_span(spans, "framesieve-generation")
    assert timings.time_to_first_token_s * 1e9 <= ordered[2].end_ns - request.start_ns + CLOCKS_NS
    assert request.end_ns >= ordered[-1].end_ns


async def test_cache_hits_leave_out_the_spans_of_the_work_they_save(
    stack: LocalStack, stub: GenerationServiceStub, collector: Collector
) -> None:
    video = Video(data=media.clip(16, fps=4, seed=83))
    own = {"framesieve-preprocessing": ["plan"], "framesieve-encoder": ["prune"]}
    asked = {
        "new": STAGES | {"framesieve-preprocessing": STAGES["framesieve-preprocessing"][1:]},
        "another rate": own | {"framesieve-generation": STAGES["framesieve-generation"]},
        "again": own | {"framesieve-encoder": [], "framesieve-generation": STAGES["framesieve-generation"][1:]},
    }
    for (name, stages), rate in zip(asked.items(), (0.5, 0.25, 0.25), strict=True):
        async for _ in stub.Generate(question(video, rate), **called(name)):
            pass
        spans = await spans_of(collector, name, len(REQUESTS) + sum(map(len, stages.values())))
        names = {service: sorted(span.name for span in own) for service, own in spans.items()}
        assert names == {service: sorted([*stages[service], REQUESTS[service]]) for service in REQUESTS}
    assert (await ended(stack, "another rate"))["encoder"]["cached_media"] == 1
    assert (await ended(stack, "again"))["generation"]["cached_prompt_tokens"] > 0


async def test_a_refusal_is_a_warning_in_each_log_and_a_failed_span_in_each_service(
    stack: LocalStack, stub: GenerationServiceStub, collector: Collector, fetch_port: int
) -> None:
    async with serving(head(404, "Content-Length: 0"), port=fetch_port):
        asked = question(Video(url=f"http://localhost:{fetch_port}/{SECRET}.mp4?key={SECRET}"))
        with pytest.raises(grpc.aio.AioRpcError):
            [response async for response in stub.Generate(asked, **called("refused-1"))]
    for line in (await ended(stack, "refused-1")).values():
        assert (line["level"], line["code"], line["reason"]) == ("warning", "INVALID_ARGUMENT", "MEDIA_REJECTED")
        assert "was answered with status 404" in line["error"]
    spans = await spans_of(collector, "refused-1", len(REQUESTS) + len(["fetch"]))
    for span in (span for own in spans.values() for span in own):
        assert span.failed
        assert span.attributes["error.type"] == "MEDIA_REJECTED"


async def test_a_url_with_a_password_is_refused_and_not_logged(
    stack: LocalStack, stub: GenerationServiceStub, collector: Collector, fetch_port: int
) -> None:
    asked = question(Video(url=f"http://user:{SECRET}@localhost:{fetch_port}/clip.mp4"))
    with pytest.raises(grpc.aio.AioRpcError):
        [response async for response in stub.Generate(asked, **called("refused-2"))]
    assert {line["code"] for line in (await ended(stack, "refused-2")).values()} == {"INVALID_ARGUMENT"}


async def test_a_disconnect_ends_all_spans_as_cancelled(
    stack: LocalStack, stub: GenerationServiceStub, collector: Collector
) -> None:
    call = stub.Generate(question(Video(data=media.clip(512, fps=8))), **called("left-1"))
    async for response in call:
        if response.WhichOneof("response") == "progress":
            break
    call.cancel()
    assert {line["code"] for line in (await ended(stack, "left-1")).values()} == {"CANCELLED"}

    def all_there() -> float:
        return len({span.service for span in collector.of_request("left-1") if span.name in REQUESTS.values()})

    assert await settles(all_there, len(REQUESTS), within_s=20)
    spans = collector.of_request("left-1")
    requests = {span.service: span for span in spans if span.name in REQUESTS.values()}
    assert all(span.failed and span.attributes["error.type"] == "CANCELLED" for span in requests.values())
    (decode,) = (span for span in spans if span.name == "decode")
    assert decode.failed
    assert decode.end_ns - decode.start_ns > 0


async def test_neither_logs_nor_traces_contain_prompts_or_urls(
    stack: LocalStack, stub: GenerationServiceStub, collector: Collector, fetch_port: int
) -> None:
    """Nor do those of the tests above, which ask with the same secret."""
    async with serving(ok(media.clip(16, fps=4, seed=81)), port=fetch_port):
        asked = question(Video(url=f"http://localhost:{fetch_port}/{SECRET}.mp4?key={SECRET}"))
        async for _ in stub.Generate(asked, **called("secret-1")):
            pass
    await ended(stack, "secret-1")
    for service in METHODS:
        assert lines(stack, service), "every line is JSON"
        assert SECRET not in stack.log(service)
    assert collector.spans
    assert SECRET.encode() not in collector.sent
