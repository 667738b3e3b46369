"""The rows that say whether all is well and, if not, which stage to look at: of the system as a whole."""

from __future__ import annotations

from deploy.grafana.panels import Limit, Panel, bars, light, lines, stacked, switches
from deploy.grafana.queries import INTERVAL, mean, of, percentile, rate, total
from framesieve.client.answer import STAGES

TTFT = "framesieve_generation_time_to_first_token_seconds"
ITL = "framesieve_generation_inter_token_seconds"
FIRST_TOKEN_LIMIT = Limit(10, ("FramesieveFirstTokenSlow",))
INTER_TOKEN_LIMIT = Limit(0.5, ("FramesieveTokensSlow",))
ERROR_LIMITS = (Limit(0.03, ("FramesieveErrorsPersist",), "orange"), Limit(0.072, ("FramesieveErrorsMany",)))
QUEUE_LIMIT = Limit(
    5,
    (
        "FramesieveDecodeQueueOld",
        "FramesieveMediaBufferFull",
        "FramesieveEncoderQueueOld",
        "FramesieveGenerationQueueOld",
    ),
)
OVERLOAD_LIMIT = Limit(0.05, ("FramesieveOverloaded",))


def well() -> list[Panel]:
    """All instances together, whichever the variable names."""
    firing = 'count(ALERTS{{alertname=~"Framesieve.+", alertstate="firing", severity="{}"}}) or vector(0)'
    return [
        switches(
            "Services",
            "Whether at least one replica of each service can be asked and says that it is serving.",
            {"{{job}}": "max by (job) (instance:framesieve_serving:bool)"},
            Limit(0, ("FramesieveServiceDown", "FramesieveReplicaDown")),
            width=5,
        ),
        light(
            "Alerts",
            "How many alerts fire; docs/runbook.md has a section for each.",
            "none",
            {each: firing.format(each) for each in ("critical", "warning")},
            Limit(1),
            width=4,
        ),
        light(
            "Errors",
            "Share of requests that failed by our fault in 5 minutes, of the method that has most.",
            "percentunit",
            {"": "max(method:framesieve_request_errors:ratio_rate5m)"},
            *ERROR_LIMITS,
        ),
        light(
            "First token, p50",
            "Half of the answers of the last 5 minutes began within this time.",
            "s",
            {"": "framesieve:time_to_first_token_seconds:p50_5m"},
            Limit(FIRST_TOKEN_LIMIT.value),
        ),
        light(
            "First token, p99",
            "99 of 100 answers of the last 5 minutes began within this time.",
            "s",
            {"": "framesieve:time_to_first_token_seconds:p99_5m"},
            FIRST_TOKEN_LIMIT,
        ),
        light(
            "Between tokens, p99",
            "99 of 100 tokens of the last 5 minutes came within this time of the one before.",
            "s",
            {"": "framesieve:inter_token_seconds:p99_5m"},
            INTER_TOKEN_LIMIT,
        ),
        light(
            "Throughput",
            "Answers finished and tokens generated, a second.",
            "none",
            {
                "answers/s": f"sum(rate(framesieve_generation_answers_total[{INTERVAL}]))",
                "tokens/s": f"sum(rate(framesieve_generation_generated_tokens_total[{INTERVAL}]))",
            },
        ),
        stacked(
            "Time to first token by stage",
            "The mean of the requests whose first token came; what each stage added to it, so the height is the whole.",
            "s",
            {
                stage: f'sum(rate(framesieve_generation_stage_seconds_sum{{stage="{stage}"}}[{INTERVAL}]))'
                f" / sum(rate({TTFT}_count[{INTERVAL}]))"
                for stage in STAGES
            },
        )
        .span(14)
        .height(9),
        bars(
            "Oldest in each queue",
            "For how long the first in each queue has waited.",
            "s",
            {"{{queue}}": "queue:framesieve_oldest_seconds:max"},
            QUEUE_LIMIT,
            width=10,
        ),
    ]


def requests() -> list[Panel]:
    everywhere = "framesieve_requests_total"
    return [
        lines(
            "Requests by outcome",
            "Requests that ended, a second: Generate is a question, Encode and Preprocess are what it calls.",
            "reqps",
            {"{{method}} {{code}}": total("method, code", rate(everywhere)) + " > 0"},
        ),
        lines(
            "Refusals by reason",
            "Requests that ended with an error of ours, a second. Watched by FramesievePeerContractBroken.",
            "reqps",
            {"{{method}} {{reason}}": total("method, reason", rate("framesieve_refusals_total")) + " > 0"},
        ),
        lines(
            "Errors",
            "Share of requests that failed by our fault (INTERNAL, UNAVAILABLE), in 1 hour.",
            "percentunit",
            {"{{method}}": "method:framesieve_request_errors:ratio_rate1h"},
            *ERROR_LIMITS,
        ),
        lines(
            "Refused by overload",
            "Share of requests that met a full queue or budget, in 5 minutes.",
            "percentunit",
            {"{{method}}": "method:framesieve_refusals_overloaded:ratio_rate5m"},
            OVERLOAD_LIMIT,
        ),
        lines(
            "Requests running",
            "Requests that are being served now.",
            "none",
            {"{{method}}": total("method", of("framesieve_requests_running"))},
        ),
        lines(
            "Duration of requests",
            "From arrival to end, however they ended: the median, and what 99 of 100 stay within.",
            "s",
            {
                f"{{{{method}}}} p{q * 100:g}": percentile(q, "framesieve_request_seconds", by="method")
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
            "From a token of an answer to the next.",
            "s",
            {f"p{q * 100:g}": percentile(q, ITL) for q in quantiles},
            INTER_TOKEN_LIMIT,
        ),
        lines(
            "Stages, p99",
            "What 99 of 100 requests waited for each stage at most, before their first token.",
            "s",
            {"{{stage}}": percentile(0.99, "framesieve_generation_stage_seconds", by="stage")},
        ),
        lines(
            "Work by stage",
            "Seconds of work a second: how many workers, or how much of a device, each stage keeps busy.",
            "none",
            {"{{stage}}": total("stage", rate("framesieve_stage_busy_seconds_sum"))},
        ),
        lines(
            "Work of one item by stage",
            "The mean time that a stage works on one request, media item or step.",
            "s",
            {"{{stage}}": mean("framesieve_stage_busy_seconds", by="stage")},
        ),
        lines(
            "Upstream retries",
            "Calls to other services that were lost halfway and tried again, a second.",
            "cps",
            {"{{stage}}": total("stage", rate("framesieve_upstream_retries_total"))},
        ),
    ]
