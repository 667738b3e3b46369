"""Prometheus metrics of the engine and the caches; those of answers and of sources are with these."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Counter, Gauge, Histogram

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.contract.plan import MediaPlan
from gridsieve.common.contract.retention import METHODS, ItemPruning, method_of
from gridsieve.common.telemetry.metrics import FINE_SECONDS_BUCKETS, STAGE_BUSY_SECONDS, age_seconds
from gridsieve.services.generation.engine.engine import Engine
from gridsieve.services.generation.engine.stats import Step
from gridsieve.v1.generation_pb2 import Usage

_PREFIX = "gridsieve_generation_"

PROMPT_TOKENS = Counter(f"{_PREFIX}prompt_tokens_total", "Prompt tokens, before and after pruning", ["pruning"])
MEDIA_TOKENS = Counter(
    f"{_PREFIX}media_tokens_total", "Tokens of media items, before and after pruning", ["method", "pruning"]
)
QUEUE = Gauge(f"{_PREFIX}engine_requests", "Answers in the engine by state", ["state"])
QUEUE_OLDEST_SECONDS = Gauge(
    f"{_PREFIX}engine_oldest_seconds", "Longest time that an answer has been in this state; 0 if none is", ["state"]
)
QUEUE_LIMIT = Gauge(f"{_PREFIX}engine_requests_limit", "--max-num-seqs and --max-waiting-requests", ["state"])
BLOCKS_USED = Gauge(f"{_PREFIX}kv_blocks_used", "KV cache blocks held by requests and live sessions")
LIVE_SESSIONS = Gauge(f"{_PREFIX}live_sessions", "Live sessions that are open")
BLOCKS_IDLE = Gauge(f"{_PREFIX}kv_blocks_idle", "KV cache blocks held by no request, kept for prefix cache hits")
BLOCKS = Gauge(f"{_PREFIX}kv_blocks", "KV cache blocks in total")
STATES_USED = Gauge(f"{_PREFIX}states_used", "Slots of recurrent states held by requests")
SNAPSHOTS = Gauge(f"{_PREFIX}state_snapshots", "Recurrent states kept for prefix cache hits")
STATES = Gauge(f"{_PREFIX}states", "Slots of recurrent states in total; 0 for models without any")
MEDIA_BYTES_USED = Gauge(f"{_PREFIX}media_buffer_used_bytes", "Bytes of --media-buffer-bytes held by requests")
MEDIA_BYTES = Gauge(f"{_PREFIX}media_buffer_bytes", "--media-buffer-bytes")
MEDIA_WAITING = Gauge(f"{_PREFIX}media_buffer_waiting", "Requests waiting for bytes of the media buffer")
MEDIA_OLDEST_SECONDS = Gauge(
    f"{_PREFIX}media_buffer_oldest_seconds", "How long the oldest of these has waited; 0 if none does"
)
STEP_SECONDS = Histogram(f"{_PREFIX}step_seconds", "Duration of an engine step", buckets=FINE_SECONDS_BUCKETS)
# From a single decoded token to a full --max-num-batched-tokens; at most --max-num-seqs sequences.
STEP_TOKENS = Histogram(f"{_PREFIX}step_tokens", "Tokens of one step", buckets=[2**power for power in range(15)])
STEP_SEQUENCES = Histogram(
    f"{_PREFIX}step_sequences", "Sequences of one step", buckets=[2**power for power in range(10)]
)
COMPUTED_TOKENS = Counter(
    f"{_PREFIX}computed_tokens_total",
    "Tokens computed: of prompts (prefill), of answers with draft tokens (decode)",
    ["phase"],
)
REPLAYED_STEPS = Counter(f"{_PREFIX}replayed_steps_total", "Steps that a CUDA graph computed")
PREEMPTIONS = Counter(f"{_PREFIX}preemptions_total", "Times that an answer was preempted by an older one")
DRAFT_TOKENS = Counter(f"{_PREFIX}draft_tokens_total", "Draft tokens of speculative decoding")
ACCEPTED_DRAFT_TOKENS = Counter(f"{_PREFIX}accepted_draft_tokens_total", "Draft tokens that the model accepted")

for _busy in ("transfer", "prefill"):
    STAGE_BUSY_SECONDS.labels(_busy)
for _when in ("before", "after"):
    PROMPT_TOKENS.labels(_when)
    for _method in METHODS:
        MEDIA_TOKENS.labels(_method, _when)
for _phase in ("prefill", "decode"):
    COMPUTED_TOKENS.labels(_phase)


def watch(engine: Engine, media_buffer: ByteSemaphore, max_running: int, max_waiting: int) -> None:
    """Connects the gauges to the engine and the media buffer; their values are read at each scrape."""
    QUEUE.labels("running").set_function(lambda: engine.stats().running)
    QUEUE.labels("waiting").set_function(lambda: engine.stats().waiting)
    QUEUE.labels("awaiting_media").set_function(lambda: engine.stats().awaiting_media)
    QUEUE.labels("following").set_function(lambda: engine.stats().awaiting_sibling)
    QUEUE_OLDEST_SECONDS.labels("running").set_function(lambda: age_seconds(engine.stats().running_since_ns))
    QUEUE_OLDEST_SECONDS.labels("waiting").set_function(lambda: age_seconds(engine.stats().waiting_since_ns))
    QUEUE_OLDEST_SECONDS.labels("awaiting_media").set_function(
        lambda: age_seconds(engine.stats().awaiting_media_since_ns)
    )
    BLOCKS_USED.set_function(lambda: engine.stats().blocks_used)
    LIVE_SESSIONS.set_function(lambda: engine.stats().sessions)
    BLOCKS_IDLE.set_function(lambda: engine.stats().blocks_idle)
    BLOCKS.set_function(lambda: engine.stats().blocks_total)
    STATES_USED.set_function(lambda: engine.stats().states_used)
    SNAPSHOTS.set_function(lambda: engine.stats().snapshots)
    STATES.set_function(lambda: engine.stats().states_total)
    QUEUE_LIMIT.labels("running").set(max_running)
    QUEUE_LIMIT.labels("waiting").set(max_waiting)
    MEDIA_BYTES_USED.set_function(lambda: media_buffer.held_bytes)
    MEDIA_BYTES.set(media_buffer.size_bytes)
    MEDIA_WAITING.set_function(lambda: media_buffer.waiting)
    MEDIA_OLDEST_SECONDS.set_function(lambda: age_seconds(media_buffer.oldest_ns))


def count_step(step: Step) -> None:
    STEP_SECONDS.observe(step.seconds)
    STEP_TOKENS.observe(step.prompt_tokens + step.answer_tokens)
    STEP_SEQUENCES.observe(step.sequences)
    COMPUTED_TOKENS.labels("prefill").inc(step.prompt_tokens)
    COMPUTED_TOKENS.labels("decode").inc(step.answer_tokens)
    REPLAYED_STEPS.inc(step.replayed)
    PREEMPTIONS.inc(step.preemptions)
    DRAFT_TOKENS.inc(step.draft_tokens)
    ACCEPTED_DRAFT_TOKENS.inc(step.accepted_draft_tokens)
    if step.prompt_tokens:
        STAGE_BUSY_SECONDS.labels("prefill").observe(step.seconds)


def count_prompt(usage: Usage, media: Sequence[MediaPlan], prunings: Sequence[ItemPruning]) -> None:
    """Counts a prompt whose media have arrived. media, prunings: one for each media item."""
    PROMPT_TOKENS.labels("before").inc(usage.prompt_tokens_full)
    PROMPT_TOKENS.labels("after").inc(usage.prompt_tokens)
    for item, pruning, counted in zip(media, prunings, usage.media, strict=True):
        method = method_of(pruning, item.modality)
        MEDIA_TOKENS.labels(method, "before").inc(item.grid.tokens)
        MEDIA_TOKENS.labels(method, "after").inc(counted.num_kept)
