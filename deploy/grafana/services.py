"""The dashboard's rows about the three services: queues, work, buffers and cameras."""

from __future__ import annotations

from deploy.grafana.panels import HEIGHT, THIRD, Limit, Panel, lines, stacked, switches
from deploy.grafana.queries import mean, of, oldest, percentile, rate, share, total


def preprocessing() -> list[Panel]:
    prefix = "gridsieve_preprocessing"
    return [
        lines(
            "Jobs",
            "Media that workers process or that wait for one, by pool (read: for the plan, decode: for frames), and "
            "prompts that wait for a planning thread.",
            "none",
            {
                "plan waiting": f"sum({of(f'{prefix}_planning_waiting')})",
                "{{pool}} busy": total("pool", of(f"{prefix}_workers_busy")),
                "{{pool}} waiting": total("pool", of(f"{prefix}_queue_jobs")),
            },
        ),
        lines(
            "Wait for a worker",
            "How long the first job in each pool's queue has waited, and the first prompt for a planning thread.",
            "s",
            {
                "plan": f"max({of(f'{prefix}_planning_oldest_seconds')})",
                "{{pool}}": oldest("pool", of(f"{prefix}_queue_oldest_seconds")),
            },
            Limit(5, ("GridsieveDecodeQueueOld",)),
        ),
        lines(
            "Workers busy",
            "Fraction of the worker processes that have a job.",
            "percentunit",
            {"{{pool}}": share(total("pool", of(f"{prefix}_workers_busy")), total("pool", of(f"{prefix}_workers")))},
        ),
        lines(
            "Workers replaced",
            "Worker processes replaced in 15 minutes, by reason.",
            "none",
            {"{{instance}} {{reason}}": f"increase({of(f'{prefix}_worker_restarts_total')}[15m])"},
            Limit(3, ("GridsieveWorkersCrash",)),
        ),
        lines(
            "Frames",
            "Frames sent per second; a repaired frame could not be decoded and repeats the previous one.",
            "none",
            {"{{outcome}}": total("outcome", rate(f"{prefix}_frames_total"))},
        ),
        lines(
            "Decoded ahead",
            "Fraction of --inflight-bytes used by decoded slices that their callers have not read.",
            "percentunit",
            {"{{instance}}": share(of(f"{prefix}_inflight_used_bytes"), of(f"{prefix}_inflight_bytes"))},
        ),
    ]


def encoder() -> list[Panel]:
    prefix = "gridsieve_encoder"
    return [
        lines(
            "Slices that wait",
            "Temporal slices that wait for the vision tower.",
            "none",
            {"{{instance}}": of(f"{prefix}_queue_slices")},
        ),
        lines(
            "Wait for the encoder",
            "How long the first slice has waited for the tower, and the first item for buffer space.",
            "s",
            {
                "tower": f"max({of(f'{prefix}_queue_oldest_seconds')})",
                "buffer {{buffer}}": oldest("buffer", of(f"{prefix}_buffer_oldest_seconds")),
            },
            Limit(5, ("GridsieveEncoderQueueOld",)),
        ),
        lines(
            "Tower busy",
            "Fraction of the time that the tower computes.",
            "percentunit",
            {"{{instance}}": rate("gridsieve_stage_busy_seconds_sum", 'stage="encode"')},
        ),
        lines(
            "Slices of one forward",
            "Mean number of temporal slices in a forward of the tower.",
            "none",
            {"slices": mean(f"{prefix}_batch_slices")},
        ),
        lines(
            "Tokens of one forward",
            "Mean number of merged tokens in a forward of the tower.",
            "none",
            {"tokens": mean(f"{prefix}_batch_tokens")},
        ),
        lines(
            "Buffers in use",
            "Fraction of --output-buffer-bytes that is reserved, for items being encoded and embeddings being sent.",
            "percentunit",
            {"{{instance}} {{buffer}}": share(of(f"{prefix}_buffer_used_bytes"), of(f"{prefix}_buffer_bytes"))},
        ),
        lines(
            "Items that wait for a buffer",
            "Media items that wait for buffer space.",
            "none",
            {"{{instance}} {{buffer}}": of(f"{prefix}_buffer_waiting")},
        ),
        lines(
            "Items answered",
            "Media items sent per second.",
            "none",
            {"{{modality}}": total("modality", rate(f"{prefix}_items_total"))},
        ),
    ]


def generation() -> list[Panel]:
    prefix = "gridsieve_generation"
    return [*_engine(prefix), *_buffers(prefix), *_output(prefix)]


def cameras() -> list[Panel]:
    prefix = "gridsieve_generation_source"
    by_source = "{{source}}"
    return [
        switches(
            "Cameras",
            "Whether frames come of each source that live sessions watch.",
            {by_source: f"min by (source) ({of(f'{prefix}_up')})"},
            Limit(0, ("GridsieveCameraGone",)),
            width=THIRD,
        ).height(HEIGHT),
        lines(
            "Frames of cameras",
            "Frames per second that come of each source.",
            "none",
            {by_source: total("source", rate(f"{prefix}_frames_total"))},
        ),
        lines(
            "Lag of cameras",
            "From the coming of a slice's last frame to the end of its computation: 99th percentile.",
            "s",
            {by_source: percentile(0.99, f"{prefix}_lag_seconds", by="source")},
        ),
        lines(
            "Cameras opened again",
            "How often frames came again in 15 minutes, after a source was lost.",
            "none",
            {by_source: total("source", f"increase({of(f'{prefix}_reopened_total')}[15m])")},
        ),
        lines(
            "Frames of cameras dropped",
            "Frames per second that were not used, by reason.",
            "none",
            {"{{source}} {{reason}}": total("source, reason", rate(f"{prefix}_dropped_frames_total"))},
        ),
        lines(
            "Tokens of cameras kept",
            "Fraction of the tokens of each source's slices that pruning keeps.",
            "percentunit",
            {
                by_source: share(
                    total("source", rate(f"{prefix}_tokens_total", 'pruning="after"')),
                    total("source", rate(f"{prefix}_tokens_total", 'pruning="before"')),
                )
            },
        ),
    ]


def _engine(prefix: str) -> list[Panel]:
    return [
        lines(
            "Answers in the engine",
            "Completions by state; a following one waits for a sibling's prefill of the same prompt.",
            "none",
            {"{{state}}": total("state", of(f"{prefix}_engine_requests"))},
        ),
        lines(
            "Longest in a state",
            "The longest time that a completion has been in each state.",
            "s",
            {"{{state}}": oldest("state", of(f"{prefix}_engine_oldest_seconds"))},
            Limit(5, ("GridsieveGenerationQueueOld",)),
        ),
        lines(
            "Places taken",
            "Fraction of --max-num-seqs (running) and of --max-waiting-requests (waiting) in use.",
            "percentunit",
            {
                "{{instance}} {{state}}": of(f"{prefix}_engine_requests", 'state=~"running|waiting"')
                + " / on (instance, state) "
                + of(f"{prefix}_engine_requests_limit")
            },
        ),
        lines(
            "Steps",
            "Duration of an engine step: median and 99th percentile. Watched by GridsieveEngineStandsStill.",
            "s",
            {f"p{q * 100:g}": percentile(q, f"{prefix}_step_seconds") for q in (0.5, 0.99)},
        ),
        lines(
            "Sequences of one step",
            "Mean number of sequences in an engine step.",
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
            "Blocks used by requests, unused but cached, and free.",
            "none",
            {"used": used, "remembered": idle, "free": f"{blocks} - {used} - {idle}"},
        ),
        lines(
            "KV cache in use",
            "Fraction of the blocks that requests use.",
            "percentunit",
            {"{{instance}}": of("instance:gridsieve_generation_kv_used:ratio")},
            Limit(0.9, ("GridsieveKvCacheFull",)),
        ),
        lines(
            "Preemptions",
            "Completions per second that lost their blocks to older ones and have to recompute them.",
            "none",
            {"{{instance}}": rate(f"{prefix}_preemptions_total")},
            Limit(0.1, ("GridsieveKvCacheFull",)),
        ),
        lines(
            "Media buffer in use",
            "Fraction of --media-buffer-bytes that embeddings use.",
            "percentunit",
            {"{{instance}}": share(of(f"{prefix}_media_buffer_used_bytes"), of(f"{prefix}_media_buffer_bytes"))},
        ),
        lines(
            "Wait for the media buffer",
            "How long the first request has waited for buffer space for its embeddings.",
            "s",
            {"{{instance}}": of(f"{prefix}_media_buffer_oldest_seconds")},
            Limit(5, ("GridsieveMediaBufferFull",)),
        ),
        lines(
            "Requests that wait for the media buffer",
            "Requests that wait to select their media until there is buffer space.",
            "none",
            {"{{instance}}": of(f"{prefix}_media_buffer_waiting")},
        ),
    ]


def _output(prefix: str) -> list[Panel]:
    return [
        lines(
            "Tokens computed",
            "Tokens computed per second, of prompts (prefill) and completions (decode).",
            "none",
            {"{{phase}}": total("phase", rate(f"{prefix}_computed_tokens_total"))},
        ),
        lines(
            "Answers",
            "Completions finished per second, by finish reason.",
            "none",
            {"{{reason}}": total("reason", rate(f"{prefix}_answers_total"))},
        ),
    ]
