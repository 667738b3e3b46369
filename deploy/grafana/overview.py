"""The dashboard's rows about the whole system: overview, requests, latency."""

from __future__ import annotations

from deploy.grafana.panels import Limit, Panel, bars, light, lines, stacked, switches
from deploy.grafana.queries import INTERVAL, mean, of, percentile, rate, total
from gridsieve.client.answer import STAGES

TTFT = "gridsieve_generation_time_to_first_token_seconds"
ITL = "gridsieve_generation_inter_token_seconds"
FIRST_TOKEN_LIMIT = Limit(10, ("GridsieveFirstTokenSlow",))
INTER_TOKEN_LIMIT = Limit(0.5, ("GridsieveTokensSlow",))
ERROR_LIMITS = (Limit(0.03, ("GridsieveErrorsPersist",), "orange"), Limit(0.072, ("GridsieveErrorsMany",)))
QUEUE_LIMIT = Limit(
    5,
    (
        "GridsieveDecodeQueueOld",
        "GridsieveMediaBufferFull",
        "GridsieveEncoderQueueOld",
        "GridsieveGenerationQueueOld",
    ),
)
OVERLOAD_LIMIT = Limit(0.05, ("GridsieveOverloaded",))


def well() -> list[Panel]:
    """The overview: all instances together, regardless of the dashboard's variable."""
    firing = 'count(ALERTS{{alertname=~"Gridsieve.+", alertstate="firing", severity="{}"}}) or vector(0)'
    return [
        switches(
            "Services",
            "Whether at least one replica of each service is reachable and serving.",
            {"{{job}}": "max by (job) (instance:gridsieve_serving:bool)"},
            Limit(0, ("GridsieveServiceDown", "GridsieveReplicaDown")),
            width=5,
        ),
        light(
            "Alerts",
            "Number of firing alerts; docs/runbook.md has a section for each.",
            "none",
            {each: firing.format(each) for each in ("critical", "warning")},
            Limit(1),
            width=4,
        ),
        light(
            "Errors",
            "Fraction of requests with INTERNAL or UNAVAILABLE in 5 minutes, of the worst method.",
            "percentunit",
            {"": "max(method:gridsieve_request_errors:ratio_rate5m)"},
            *ERROR_LIMITS,
        ),
        light(
            "First token, p50",
            "Median time to first token of the last 5 minutes.",
            "s",
            {"": "gridsieve:time_to_first_token_seconds:p50_5m"},
            Limit(FIRST_TOKEN_LIMIT.value),
        ),
        light(
            "First token, p99",
            "99th percentile of the time to first token, last 5 minutes.",
            "s",
            {"": "gridsieve:time_to_first_token_seconds:p99_5m"},
            FIRST_TOKEN_LIMIT,
        ),
        light(
            "Between tokens, p99",
            "99th percentile of the time between tokens, last 5 minutes.",
            "s",
            {"": "gridsieve:inter_token_seconds:p99_5m"},
            INTER_TOKEN_LIMIT,
        ),
        light(
            "Throughput",
            "Completions finished and tokens generated per second.",
            "none",
            {
                "answers/s": f"sum(rate(gridsieve_generation_answers_total[{INTERVAL}]))",
                "tokens/s": f"sum(rate(gridsieve_generation_generated_tokens_total[{INTERVAL}]))",
            },
        ),
        stacked(
            "Time to first token by stage",
            "Mean time of each stage before the first token; their sum is the mean time to first token.",
            "s",
            {
                stage: f'sum(rate(gridsieve_generation_stage_seconds_sum{{stage="{stage}"}}[{INTERVAL}]))'
                f" / sum(rate({TTFT}_count[{INTERVAL}]))"
                for stage in STAGES
            },
        )
        .span(14)
        .height(9),
        bars(
            "Oldest in each queue",
            "How long the first entry of each queue has waited.",
            "s",
            {"{{queue}}": "queue:gridsieve_oldest_seconds:max"},
            QUEUE_LIMIT,
            width=10,
        ),
    ]


def requests() -> list[Panel]:
    everywhere = "gridsieve_requests_total"
    return [
        lines(
            "Requests by outcome",
            "Finished requests per second. Clients call Generate, which calls Encode, which calls Preprocess.",
            "reqps",
            {"{{method}} {{code}}": total("method, code", rate(everywhere)) + " > 0"},
        ),
        lines(
            "Refusals by reason",
            "Requests per second that ended with an error of the services. Watched by GridsievePeerContractBroken.",
            "reqps",
            {"{{method}} {{reason}}": total("method, reason", rate("gridsieve_refusals_total")) + " > 0"},
        ),
        lines(
            "Errors",
            "Fraction of requests with INTERNAL or UNAVAILABLE, in 1 hour.",
            "percentunit",
            {"{{method}}": "method:gridsieve_request_errors:ratio_rate1h"},
            *ERROR_LIMITS,
        ),
        lines(
            "Refused by overload",
            "Fraction of requests rejected because a queue or budget was full, in 5 minutes.",
            "percentunit",
            {"{{method}}": "method:gridsieve_refusals_overloaded:ratio_rate5m"},
            OVERLOAD_LIMIT,
        ),
        lines(
            "Requests running",
            "Requests in progress.",
            "none",
            {"{{method}}": total("method", of("gridsieve_requests_running"))},
        ),
        lines(
            "Duration of requests",
            "From arrival to end, with any status: median and 99th percentile.",
            "s",
            {
                f"{{{{method}}}} p{q * 100:g}": percentile(q, "gridsieve_request_seconds", by="method")
                for q in (0.5, 0.99)
            },
        ),
    ]


def latency() -> list[Panel]:
    quantiles = (0.5, 0.9, 0.99)
    return [
        lines(
            "Time to first token",
            "From a request's arrival at generation to its first token.",
            "s",
            {f"p{q * 100:g}": percentile(q, TTFT) for q in quantiles},
            FIRST_TOKEN_LIMIT,
        ),
        lines(
            "Time between tokens",
            "From one token of a completion to the next.",
            "s",
            {f"p{q * 100:g}": percentile(q, ITL) for q in quantiles},
            INTER_TOKEN_LIMIT,
        ),
        lines(
            "Stages, p99",
            "99th percentile of each stage's part of the time to first token.",
            "s",
            {"{{stage}}": percentile(0.99, "gridsieve_generation_stage_seconds", by="stage")},
        ),
        lines(
            "Work by stage",
            "Seconds of work per second: the number of workers, or fraction of a device, that each stage keeps busy.",
            "none",
            {"{{stage}}": total("stage", rate("gridsieve_stage_busy_seconds_sum"))},
        ),
        lines(
            "Work of one item by stage",
            "Mean time that a stage works on one request, media item or step.",
            "s",
            {"{{stage}}": mean("gridsieve_stage_busy_seconds", by="stage")},
        ),
        lines(
            "Upstream retries",
            "Calls to other services per second that were lost midway and retried.",
            "cps",
            {"{{stage}}": total("stage", rate("gridsieve_upstream_retries_total"))},
        ),
    ]
