"""What generation tells Prometheus beside what every service does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import Counter, Gauge, Histogram

from common.plan import MediaPlan, Modality
from common.retention import NONE, Pruning
from common.room import Room
from common.telemetry import SECONDS_BUCKETS
from services.generation.engine import Engine, EngineStats
from services.generation.timing import StageClock

_PREFIX = "framesieve_generation_"

FIRST_TOKEN_SECONDS = Histogram(
    f"{_PREFIX}time_to_first_token_seconds", "From a request's arrival to its first token", buckets=SECONDS_BUCKETS
)
STAGE_SECONDS = Histogram(
    f"{_PREFIX}stage_seconds",
    "Shares of the time to first token by stage; the sums of all stages are the time to first token's sum",
    ["stage"],
    buckets=SECONDS_BUCKETS,
)
PROMPT_TOKENS = Counter(f"{_PREFIX}prompt_tokens_total", "Prompt tokens, before and after pruning", ["pruning"])
MEDIA_TOKENS = Counter(
    f"{_PREFIX}media_tokens_total", "Tokens of media items, before and after pruning", ["method", "pruning"]
)
CACHED_TOKENS = Counter(
    f"{_PREFIX}cached_prompt_tokens_total", "Prompt tokens, after pruning, that earlier requests had computed"
)
GENERATED_TOKENS = Counter(f"{_PREFIX}generated_tokens_total", "Tokens generated")
QUEUE = Gauge(f"{_PREFIX}engine_requests", "Requests in the engine, by what they do", ["state"])
BLOCKS_USED = Gauge(f"{_PREFIX}kv_blocks_used", "Blocks of the KV cache that requests hold")
BLOCKS_IDLE = Gauge(
    f"{_PREFIX}kv_blocks_idle", "Blocks of the KV cache that nobody holds, kept for who begins the same"
)
BLOCKS = Gauge(f"{_PREFIX}kv_blocks", "Blocks of the KV cache")
MEDIA_BYTES_USED = Gauge(f"{_PREFIX}media_buffer_used_bytes", "Bytes of --media-buffer-bytes that requests hold")
MEDIA_BYTES = Gauge(f"{_PREFIX}media_buffer_bytes", "--media-buffer-bytes")


def watch(engine: Engine, room: Room) -> None:
    """Has the gauges ask the engine and the room whenever they are read."""

    def ask(gauge: Gauge, value: Callable[[EngineStats], int]) -> None:
        gauge.set_function(lambda: value(engine.stats()))

    ask(QUEUE.labels("running"), lambda stats: stats.running)
    ask(QUEUE.labels("waiting"), lambda stats: stats.waiting)
    ask(QUEUE.labels("awaiting_media"), lambda stats: stats.awaiting_media)
    ask(BLOCKS_USED, lambda stats: stats.blocks_used)
    ask(BLOCKS_IDLE, lambda stats: stats.blocks_idle)
    ask(BLOCKS, lambda stats: stats.blocks_total)
    MEDIA_BYTES_USED.set_function(lambda: room.held_bytes)
    MEDIA_BYTES.set(room.size_bytes)


def count_prompt(
    prompt_tokens_full: int,
    prompt_tokens: int,
    media: Sequence[MediaPlan],
    prunings: Sequence[Pruning],
    kept_counts: Sequence[int],
) -> None:
    """Counts a prompt that was accepted; the last three are one for each media item."""
    PROMPT_TOKENS.labels("before").inc(prompt_tokens_full)
    PROMPT_TOKENS.labels("after").inc(prompt_tokens)
    for item, pruning, kept in zip(media, prunings, kept_counts, strict=True):
        method = NONE if item.modality is Modality.IMAGE or not pruning.rate else pruning.method
        MEDIA_TOKENS.labels(method, "before").inc(item.grid.tokens)
        MEDIA_TOKENS.labels(method, "after").inc(kept)


def observe_first_token(clock: StageClock) -> None:
    FIRST_TOKEN_SECONDS.observe(clock.first_token_ns / 1e9)
    for stage, duration_ns in clock.stages_ns().items():
        STAGE_SECONDS.labels(stage.name.lower()).observe(duration_ns / 1e9)
