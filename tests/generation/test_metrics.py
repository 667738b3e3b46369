"""Prometheus metrics agree with the usage and timings that callers receive."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from gridsieve.services.generation.rpc.metrics import watch
from gridsieve.services.generation.stage_clock import Stage
from gridsieve.v1.generation_pb2 import Sampling
from tests.common.loopback import eventually
from tests.generation.generation_service import LIMIT, ROOM_BYTES, VIDEO, answers, refused, service_of

PREFIX = "gridsieve_generation_"


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"{PREFIX}{name}", labels) or 0.0


def readings() -> dict[str, float]:
    stages = {stage.name: value("stage_seconds_sum", stage=stage.name.lower()) for stage in Stage}
    return stages | {
        "first tokens": value("time_to_first_token_seconds_count"),
        "seconds": value("time_to_first_token_seconds_sum"),
        "before": value("prompt_tokens_total", pruning="before"),
        "after": value("prompt_tokens_total", pruning="after"),
        "evs before": value("media_tokens_total", method="evs", pruning="before"),
        "evs after": value("media_tokens_total", method="evs", pruning="after"),
        "generated": value("generated_tokens_total"),
        "gaps": value("inter_token_seconds_count"),
        "ended by length": value("answers_total", reason="length"),
        "hits": value("prefix_lookups_total", outcome="hit"),
        "misses": value("prefix_lookups_total", outcome="miss"),
        "cached": value("cached_prompt_tokens_total"),
    }


async def test_tokens_and_stages_are_counted_as_reported_to_callers(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        before = readings()
        finished = (await answers(service.ask()))[-1].finished
        text = (await answers(service.ask_text()))[-1].finished
        await refused(service.ask(sampling=Sampling(max_new_tokens=LIMIT)))
        grown = {name: reading - before[name] for name, reading in readings().items()}
    assert grown["first tokens"] == 2
    ttft_s = finished.timings.time_to_first_token_s + text.timings.time_to_first_token_s
    assert grown["seconds"] == pytest.approx(ttft_s, abs=1e-6)
    assert sum(grown[stage.name] for stage in Stage) == pytest.approx(ttft_s, abs=1e-6)
    assert grown["before"] == finished.usage.prompt_tokens_full + text.usage.prompt_tokens_full
    assert grown["after"] == finished.usage.prompt_tokens + text.usage.prompt_tokens
    assert (grown["evs before"], grown["evs after"]) == (VIDEO[1].tokens, VIDEO[1].tokens // 2)
    assert grown["generated"] == 10
    assert (grown["gaps"], grown["ended by length"]) == (8, 2)  # of 5 tokens each
    assert (grown["hits"], grown["misses"], grown["cached"]) == (0, 2, 0)


async def test_hits_of_the_prefix_cache_and_answers_of_one_request_are_counted(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        await answers(service.ask())
        before = readings()
        usage = (await answers(service.ask(sampling=Sampling(max_new_tokens=5, n=3))))[-1].finished.usage
        grown = {name: reading - before[name] for name, reading in readings().items()}
    assert (grown["hits"], grown["misses"]) == (1, 0)
    assert grown["cached"] == usage.cached_prompt_tokens > 0
    assert usage.media[0].repaired_frames == 2, "the encoder said so when it sent the item"
    assert (grown["first tokens"], grown["generated"], grown["gaps"], grown["ended by length"]) == (1, 15, 12, 3)


async def test_gauges_show_blocks_bytes_and_the_requests_that_wait_for_them(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    hold = asyncio.Event()
    async with service_of(tmp_path, tiny_checkpoint, hold=hold) as service:
        watch(service.engine, service.room, 4, 8)
        assert value("kv_blocks") == service.engine.stats().blocks_total > 0
        assert value("media_buffer_bytes") == ROOM_BYTES
        assert [value("engine_requests_limit", state=state) for state in ("running", "waiting")] == [4, 8]

        async def check_one_waits_and_ages(waiting: str, oldest: str, **labels: str) -> None:
            await eventually(lambda: value(waiting, **labels) == 1)
            first_s = value(oldest, **labels)
            assert value(oldest, **labels) > first_s > 0

        async with service.room.reserved(ROOM_BYTES):
            assert value("media_buffer_used_bytes") == ROOM_BYTES
            call = service.ask()
            await check_one_waits_and_ages("media_buffer_waiting", "media_buffer_oldest_seconds")
        await check_one_waits_and_ages("engine_requests", "engine_oldest_seconds", state="awaiting_media")
        assert value("kv_blocks_used") > 0
        hold.set()
        await answers(call)
        await eventually(service.idle)
        for gauge in (
            "kv_blocks_used",
            "media_buffer_used_bytes",
            "media_buffer_waiting",
            "media_buffer_oldest_seconds",
        ):
            assert value(gauge) == 0
        for gauge in ("engine_requests", "engine_oldest_seconds"):
            assert {value(gauge, state=state) for state in ("running", "waiting", "awaiting_media")} == {0}
