"""The rows of the three services: what waits, what works, and what is full."""

from __future__ import annotations

from deploy.grafana.panels import Limit, Panel, lines, stacked
from deploy.grafana.queries import mean, of, oldest, percentile, rate, share, total


def preprocessing() -> list[Panel]:
    prefix = "framesieve_preprocessing"
    return [
        lines(
            "Jobs",
            "Media that worker processes have, or that wait for one, by pool: read for the plan, decode for frames; "
            "and prompts that wait for a thread to plan them.",
            "none",
            {
                "plan waiting": f"sum({of(f'{prefix}_planning_waiting')})",
                "{{pool}} busy": total("pool", of(f"{prefix}_workers_busy")),
                "{{pool}} waiting": total("pool", of(f"{prefix}_queue_jobs")),
            },
        ),
        lines(
            "Wait for a worker",
            "For how long the first in a pool's queue has waited, or the first prompt for a thread to plan it.",
            "s",
            {
                "plan": f"max({of(f'{prefix}_planning_oldest_seconds')})",
                "{{pool}}": oldest("pool", of(f"{prefix}_queue_oldest_seconds")),
            },
            Limit(5, ("FramesieveDecodeQueueOld",)),
        ),
        lines(
            "Workers busy",
            "Share of the worker processes that have a job.",
            "percentunit",
            {"{{pool}}": share(total("pool", of(f"{prefix}_workers_busy")), total("pool", of(f"{prefix}_workers")))},
        ),
        lines(
            "Workers replaced",
            "Worker processes that were replaced in 15 minutes, by what was wrong with them.",
            "none",
            {"{{instance}} {{reason}}": f"increase({of(f'{prefix}_worker_restarts_total')}[15m])"},
            Limit(3, ("FramesieveWorkersCrash",)),
        ),
        lines(
            "Frames",
            "Frames sent, a second; a repaired one could not be decoded and repeats the one before.",
            "none",
            {"{{outcome}}": total("outcome", rate(f"{prefix}_frames_total"))},
        ),
        lines(
            "Decoded ahead",
            "Share of --inflight-bytes that decoded slices hold until their readers take them.",
            "percentunit",
            {"{{instance}}": share(of(f"{prefix}_inflight_used_bytes"), of(f"{prefix}_inflight_bytes"))},
        ),
    ]


def encoder() -> list[Panel]:
    prefix = "framesieve_encoder"
    return [
        lines(
            "Slices that wait",
            "Temporal slices that wait for the tower.",
            "none",
            {"{{instance}}": of(f"{prefix}_queue_slices")},
        ),
        lines(
            "Wait for the encoder",
            "For how long the first slice has waited for the tower, and the first item for room.",
            "s",
            {
                "tower": f"max({of(f'{prefix}_queue_oldest_seconds')})",
                "room {{room}}": oldest("room", of(f"{prefix}_room_oldest_seconds")),
            },
            Limit(5, ("FramesieveEncoderQueueOld",)),
        ),
        lines(
            "Tower busy",
            "Share of the time that the tower computes.",
            "percentunit",
            {"{{instance}}": rate("framesieve_stage_busy_seconds_sum", 'stage="encode"')},
        ),
        lines(
            "Slices of one forward",
            "Mean number of temporal slices that the tower takes at once.",
            "none",
            {"slices": mean(f"{prefix}_batch_slices")},
        ),
        lines(
            "Tokens of one forward",
            "Mean number of merged tokens that the tower computes at once; --batch-tokens at most.",
            "none",
            {"tokens": mean(f"{prefix}_batch_tokens")},
        ),
        lines(
            "Room in use",
            "Share of --output-buffer-bytes that is reserved: for items being encoded, and for what is to be sent.",
            "percentunit",
            {"{{instance}} {{room}}": share(of(f"{prefix}_room_used_bytes"), of(f"{prefix}_room_bytes"))},
        ),
        lines(
            "Items that wait for room",
            "Media items that wait until what is encoded or sent has made room.",
            "none",
            {"{{instance}} {{room}}": of(f"{prefix}_room_waiting")},
        ),
        lines(
            "Items answered",
            "Media items, a second.",
            "none",
            {"{{modality}}": total("modality", rate(f"{prefix}_items_total"))},
        ),
    ]


def generation() -> list[Panel]:
    prefix = "framesieve_generation"
    return [*_engine(prefix), *_buffers(prefix), *_output(prefix)]


def _engine(prefix: str) -> list[Panel]:
    return [
        lines(
            "Answers in the engine",
            "By what they do; who follows waits for another answer to the same prompt.",
            "none",
            {"{{state}}": total("state", of(f"{prefix}_engine_requests"))},
        ),
        lines(
            "Longest in a state",
            "For how long one answer has been so, at most.",
            "s",
            {"{{state}}": oldest("state", of(f"{prefix}_engine_oldest_seconds"))},
            Limit(5, ("FramesieveGenerationQueueOld",)),
        ),
        lines(
            "Places taken",
            "Share of --max-num-seqs and --max-waiting-requests that is taken, by who waits for its prefill.",
            "percentunit",
            {
                "{{instance}} {{state}}": of(f"{prefix}_engine_requests", 'state=~"running|waiting"')
                + " / on (instance, state) "
                + of(f"{prefix}_engine_requests_limit")
            },
        ),
        lines(
            "Steps",
            "How long one takes: the median, and what 99 of 100 stay within. Watched by FramesieveEngineStandsStill.",
            "s",
            {f"p{q * 100:g}": percentile(q, f"{prefix}_step_seconds") for q in (0.5, 0.99)},
        ),
        lines(
            "Sequences of one step",
            "Mean number of answers that a step computes at once.",
            "none",
            {"sequences": mean(f"{prefix}_step_sequences")},
        ),
        lines(
            "Tokens of one step",
            "Mean number of tokens that a step computes at once; --max-num-batched-tokens at most.",
            "none",
            {"tokens": mean(f"{prefix}_step_tokens")},
        ),
    ]


def _buffers(prefix: str) -> list[Panel]:
    used, idle, blocks = (f"sum({of(f'{prefix}_kv_blocks{each}')})" for each in ("_used", "_idle", ""))
    return [
        stacked(
            "KV cache",
            "Blocks that requests hold, that nobody holds but are remembered, and that are free.",
            "none",
            {"used": used, "remembered": idle, "free": f"{blocks} - {used} - {idle}"},
        ),
        lines(
            "KV cache in use",
            "Share of the blocks that requests hold.",
            "percentunit",
            {"{{instance}}": of("instance:framesieve_generation_kv_used:ratio")},
            Limit(0.9, ("FramesieveKvCacheFull",)),
        ),
        lines(
            "Preemptions",
            "Answers that lost their blocks to older ones, a second; what they lose is computed again.",
            "none",
            {"{{instance}}": rate(f"{prefix}_preemptions_total")},
            Limit(0.1, ("FramesieveKvCacheFull",)),
        ),
        lines(
            "Media buffer in use",
            "Share of --media-buffer-bytes that embeddings of requests hold.",
            "percentunit",
            {"{{instance}}": share(of(f"{prefix}_media_buffer_used_bytes"), of(f"{prefix}_media_buffer_bytes"))},
        ),
        lines(
            "Wait for the media buffer",
            "For how long the first request has waited for room for its embeddings.",
            "s",
            {"{{instance}}": of(f"{prefix}_media_buffer_oldest_seconds")},
            Limit(5, ("FramesieveMediaBufferFull",)),
        ),
        lines(
            "Requests that wait for the media buffer",
            "Requests that select their media once there is room.",
            "none",
            {"{{instance}}": of(f"{prefix}_media_buffer_waiting")},
        ),
    ]


def _output(prefix: str) -> list[Panel]:
    return [
        lines(
            "Tokens computed",
            "Of prompts (prefill) and of answers (decode), a second.",
            "none",
            {"{{phase}}": total("phase", rate(f"{prefix}_computed_tokens_total"))},
        ),
        lines(
            "Answers",
            "Answers finished, a second, by why they ended.",
            "none",
            {"{{reason}}": total("reason", rate(f"{prefix}_answers_total"))},
        ),
    ]
