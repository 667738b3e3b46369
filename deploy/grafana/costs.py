"""The dashboard's rows about pruning, caches, bytes between services, and processes."""

from __future__ import annotations

from deploy.grafana.panels import Panel, lines, listed
from deploy.grafana.queries import JOBS, of, rate, share, total


def pruning() -> list[Panel]:
    media, prompts = "gridsieve_generation_media_tokens_total", "gridsieve_generation_prompt_tokens_total"
    return [
        lines(
            "Media tokens",
            "Tokens of media items per second, before and after pruning.",
            "none",
            {"{{method}} {{pruning}}": total("method, pruning", rate(media))},
        ),
        lines(
            "Media tokens kept",
            "Fraction of the tokens of media items that pruning keeps.",
            "percentunit",
            {"{{method}}": _kept(media, "method")},
        ),
        lines(
            "Prompt tokens kept",
            "Fraction of all prompt tokens, text included, that pruning keeps.",
            "percentunit",
            {"prompts": _kept(prompts, "")},
        ),
        lines(
            "Prompt tokens",
            "Prompt tokens per second, before and after pruning.",
            "none",
            {"{{pruning}}": total("pruning", rate(prompts))},
        ),
        lines(
            "Encoder's tokens kept",
            "Fraction of tokens kept over all items that the encoder has sent, to any caller.",
            "percentunit",
            {"{{method}}": _kept("gridsieve_encoder_tokens_total", "method")},
        ),
        lines(
            "Draft tokens",
            "Draft tokens per second (--speculative-tokens, --draft-model), and how many of them were accepted.",
            "none",
            {
                "drafted": total("", rate("gridsieve_generation_draft_tokens_total")),
                "accepted": total("", rate("gridsieve_generation_accepted_draft_tokens_total")),
            },
        ),
    ]


def _kept(counter: str, by: str) -> str:
    return share(total(by, rate(counter, 'pruning="after"')), total(by, rate(counter, 'pruning="before"')))


def caches() -> list[Panel]:
    lookups, prefixes = "gridsieve_encoder_cache_lookups_total", "gridsieve_generation_prefix_lookups_total"
    return [
        lines(
            "Embeddings found",
            "Fraction of requested media items that are in the encoder's cache (hit) or being encoded (shared).",
            "percentunit",
            {
                each: share(total("", rate(lookups, f'outcome="{each}"')), total("", rate(lookups)))
                for each in ("hit", "shared")
            },
        ),
        lines(
            "Embeddings cache in use",
            "Fraction of --cache-bytes that embeddings and scores use.",
            "percentunit",
            {"{{instance}}": share(of("gridsieve_encoder_cache_used_bytes"), of("gridsieve_encoder_cache_bytes"))},
        ),
        lines(
            "Embeddings evicted",
            "Media items evicted from the cache per second.",
            "none",
            {"{{instance}}": rate("gridsieve_encoder_cache_evictions_total")},
        ),
        lines(
            "Items that read the cache",
            "Requested items that wait for a cache entry or are reading it.",
            "none",
            {"{{instance}}": of("gridsieve_encoder_cache_waiters")},
        ),
        lines(
            "Prefixes found",
            "Fraction of requests with a prefix cache hit.",
            "percentunit",
            {"hit": share(total("", rate(prefixes, 'outcome="hit"')), total("", rate(prefixes)))},
        ),
        lines(
            "Prompt tokens found",
            "Fraction of prompt tokens, after pruning, that were prefix cache hits.",
            "percentunit",
            {
                "tokens": share(
                    total("", rate("gridsieve_generation_cached_prompt_tokens_total")),
                    total("", rate("gridsieve_generation_prompt_tokens_total", 'pruning="after"')),
                )
            },
        ),
    ]


def hops() -> list[Panel]:
    crossed = total("method, direction", rate("gridsieve_message_bytes_total"))
    ended = total("method", rate("gridsieve_requests_total"))
    return [
        lines(
            "Bytes by hop",
            "Message bytes per second between each method's service and its callers.",
            "Bps",
            {"{{method}} {{direction}}": crossed},
        ),
        lines(
            "Bytes of one request by hop",
            "Message bytes per finished request of each method.",
            "bytes",
            {"{{method}} {{direction}}": f"{crossed} / on (method) group_left () ({ended} > 0)"},
        ),
        lines(
            "Bytes fetched",
            "Bytes of media fetched by URL, per second.",
            "Bps",
            {"{{instance}}": rate("gridsieve_preprocessing_fetched_bytes_total")},
        ),
    ]


def processes() -> list[Panel]:
    return [
        lines(
            "Memory",
            "Resident memory of each service's main process, without workers. Watched by GridsieveMemoryGrows.",
            "bytes",
            {"{{job}} {{instance}}": of("process_resident_memory_bytes", JOBS)},
        ),
        lines(
            "Processor time",
            "Cores that each service's main process keeps busy, without worker processes.",
            "none",
            {"{{job}} {{instance}}": rate("process_cpu_seconds_total", JOBS)},
        ),
        lines(
            "Open files",
            "Fraction of the process's limit of file descriptors.",
            "percentunit",
            {"{{job}} {{instance}}": share(of("process_open_fds", JOBS), of("process_max_fds", JOBS))},
        ),
        listed(
            "Checkpoints",
            "The checkpoint of each process; fingerprints must agree. Watched by GridsieveFingerprintsDiffer.",
            {"": of("gridsieve_model_info")},
        ),
        listed("Releases", "The release of each process.", {"": of("gridsieve_build_info")}),
    ]
