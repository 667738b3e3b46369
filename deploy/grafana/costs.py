"""The rows of what is spent and what is saved: tokens, computed work that is found again, bytes, processes."""

from __future__ import annotations

from deploy.grafana.panels import Panel, lines, listed
from deploy.grafana.queries import JOBS, of, rate, share, total


def pruning() -> list[Panel]:
    media, prompts = "framesieve_generation_media_tokens_total", "framesieve_generation_prompt_tokens_total"
    return [
        lines(
            "Media tokens",
            "Tokens of media items before and after pruning, a second.",
            "none",
            {"{{method}} {{pruning}}": total("method, pruning", rate(media))},
        ),
        lines(
            "Media tokens kept",
            "Share of the tokens of media items that pruning leaves.",
            "percentunit",
            {"{{method}}": _kept(media, "method")},
        ),
        lines(
            "Prompt tokens kept",
            "Share of whole prompts, text included, that pruning leaves.",
            "percentunit",
            {"prompts": _kept(prompts, "")},
        ),
        lines(
            "Prompt tokens",
            "Tokens of prompts before and after pruning, a second.",
            "none",
            {"{{pruning}}": total("pruning", rate(prompts))},
        ),
        lines(
            "Encoder's tokens kept",
            "Share of the tokens of the items that the encoder answered, whoever asked.",
            "percentunit",
            {"{{method}}": _kept("framesieve_encoder_tokens_total", "method")},
        ),
        lines(
            "Draft tokens",
            "Draft tokens of speculative decoding (--speculative-tokens) per second, and those that were accepted.",
            "none",
            {
                "drafted": total("", rate("framesieve_generation_draft_tokens_total")),
                "accepted": total("", rate("framesieve_generation_accepted_draft_tokens_total")),
            },
        ),
    ]


def _kept(counter: str, by: str) -> str:
    return share(total(by, rate(counter, 'pruning="after"')), total(by, rate(counter, 'pruning="before"')))


def caches() -> list[Panel]:
    lookups, prefixes = "framesieve_encoder_cache_lookups_total", "framesieve_generation_prefix_lookups_total"
    return [
        lines(
            "Embeddings found",
            "Share of the media items asked of the encoder that its cache holds (hit) or is making (shared).",
            "percentunit",
            {
                each: share(total("", rate(lookups, f'outcome="{each}"')), total("", rate(lookups)))
                for each in ("hit", "shared")
            },
        ),
        lines(
            "Embeddings cache in use",
            "Share of --cache-bytes that embeddings and scores hold.",
            "percentunit",
            {"{{instance}}": share(of("framesieve_encoder_cache_used_bytes"), of("framesieve_encoder_cache_bytes"))},
        ),
        lines(
            "Embeddings evicted",
            "Media items that gave way to others, a second.",
            "none",
            {"{{instance}}": rate("framesieve_encoder_cache_evictions_total")},
        ),
        lines(
            "Items that read the cache",
            "Requested items that wait for an entry, or read it.",
            "none",
            {"{{instance}}": of("framesieve_encoder_cache_waiters")},
        ),
        lines(
            "Prefixes found",
            "Share of requests of whose prompt the KV cache held a beginning.",
            "percentunit",
            {"hit": share(total("", rate(prefixes, 'outcome="hit"')), total("", rate(prefixes)))},
        ),
        lines(
            "Prompt tokens found",
            "Share of prompt tokens, after pruning, that earlier requests had computed.",
            "percentunit",
            {
                "tokens": share(
                    total("", rate("framesieve_generation_cached_prompt_tokens_total")),
                    total("", rate("framesieve_generation_prompt_tokens_total", 'pruning="after"')),
                )
            },
        ),
    ]


def hops() -> list[Panel]:
    crossed = total("method, direction", rate("framesieve_message_bytes_total"))
    ended = total("method", rate("framesieve_requests_total"))
    return [
        lines(
            "Bytes by hop",
            "Messages as they cross the hop in front of the service that has the method, a second.",
            "Bps",
            {"{{method}} {{direction}}": crossed},
        ),
        lines(
            "Bytes of one request by hop",
            "Bytes that cross a hop for each request that ends there.",
            "bytes",
            {"{{method}} {{direction}}": f"{crossed} / on (method) group_left () ({ended} > 0)"},
        ),
        lines(
            "Bytes fetched",
            "Media that came by URL, a second.",
            "Bps",
            {"{{instance}}": rate("framesieve_preprocessing_fetched_bytes_total")},
        ),
    ]


def processes() -> list[Panel]:
    return [
        lines(
            "Memory",
            "Resident memory of each process, without preprocessing's workers. Watched by FramesieveMemoryGrows.",
            "bytes",
            {"{{job}} {{instance}}": of("process_resident_memory_bytes", JOBS)},
        ),
        lines(
            "Processor time",
            "Cores that each service's process keeps busy, without preprocessing's workers.",
            "none",
            {"{{job}} {{instance}}": rate("process_cpu_seconds_total", JOBS)},
        ),
        lines(
            "Open files",
            "Share of the file descriptors that a process may have.",
            "percentunit",
            {"{{job}} {{instance}}": share(of("process_open_fds", JOBS), of("process_max_fds", JOBS))},
        ),
        listed(
            "Checkpoints",
            "What each process serves: fingerprints have to agree. Watched by FramesieveFingerprintsDiffer.",
            {"": of("framesieve_model_info")},
        ),
        listed("Releases", "Which release each process runs.", {"": of("framesieve_build_info")}),
    ]
