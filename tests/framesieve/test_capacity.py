"""`framesieve capacity`: plans by the costs of a bench result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from framesieve.__main__ import app


def service(name: str, workers: int = 0, **busy_s: float) -> dict[str, Any]:
    sent_bytes = {"preprocessing": 280e6, "encoder": 90e6, "generation": 1e6}[name]
    return {
        "service": name, "replicas": 1, "busy_s": busy_s, "processor_s": 30.0,
        "received_bytes": 20e6, "sent_bytes": sent_bytes, "workers": workers,
    }  # fmt: skip


def bench_result() -> dict[str, Any]:
    """Of 100 requests."""
    return {
        "run": {"command": "framesieve bench --start --json", "began": "2026-11-21T12:00:00+00:00", "server": "…"},
        "by_pruning": [
            {
                "answered": 100,
                "held_s": 2.0,
                "kv_token_s": 500.0,
                "services": [
                    service("preprocessing", 4, fetch=900.0, plan=10.0, decode=60.0, resize=10.0),
                    service("encoder", encode=25.0, prune=5.0),
                    service("generation", transfer=500.0, prefill=30.0, step=20.0),
                ],
            }
        ],
    }


def with_load(**fields: Any) -> dict[str, Any]:
    """The bench result with other fields of its only load."""
    result = bench_result()
    return {**result, "by_pruning": [{**result["by_pruning"][0], **fields}]}


@pytest.fixture
def capacity(tmp_path: Path) -> Callable[..., Result]:
    def run(result: Any, *arguments: str) -> Result:
        path = tmp_path / "bench.json"
        path.write_text(result if isinstance(result, str) else json.dumps(result))
        return CliRunner().invoke(app, ["capacity", str(path), *arguments])

    return run


LOADED = ("--requests-per-s", "10", "--utilisation", "0.5", "--kv-cache-tokens", "6000")


def test_replicas_follow_from_the_costs_of_a_bench_result(capacity: Callable[..., Result]) -> None:
    result = capacity(bench_result(), *LOADED, "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    # Busy seconds per second: 8 over 4 workers, 3 and 2, each half used. fetch, transfer and prefill do not count.
    assert told["replicas"] == {"preprocessing": 4, "encoder": 6, "generation": 4}
    assert told["request"]["embeds_byte_s"] == 9e5 * 2.0
    assert told["request"]["costs"]["preprocessing"]["at_once"] == 4
    # The service's processor time, and the busy time of its workers, which it does not include.
    assert told["request"]["costs"]["preprocessing"]["processor_s"] == pytest.approx(0.3 + 0.7)
    assert told["cores"]["encoder"] == pytest.approx(10 * 0.3 / 0.5)
    assert told["kv_cache"] == {"used": 10 * 500, "replicas": 2}  # Little's law; 5000 / (0.5 · 6000)
    assert told["network_bytes_per_s"] == {"preprocessing": 30e6, "encoder": 11e6, "generation": 2.1e6}
    assert told["measured"]["command"] == "framesieve bench --start --json"


@pytest.mark.parametrize(
    ("flags", "replicas"),
    [
        (("--kv-cache-tokens", "1000"), 10),  # 5000 / (0.5 · 1000)
        (("--media-buffer-bytes", "3000000"), 12),  # 18 MB / (0.5 · 3 MB)
    ],
)
def test_generation_has_enough_replicas_for_cache_and_buffer(
    capacity: Callable[..., Result], flags: tuple[str, ...], replicas: int
) -> None:
    told = json.loads(capacity(bench_result(), *LOADED, *flags, "--json").stdout)
    assert told["replicas"] == {"preprocessing": 4, "encoder": 6, "generation": replicas}


def test_the_table_has_the_same_numbers(capacity: Callable[..., Result]) -> None:
    lines = capacity(bench_result(), *LOADED).stdout.splitlines()
    assert lines[0] == "measured:  100 requests, 2026-11-21T12:00:00+00:00, framesieve bench --start --json"
    words = [line.split() for line in lines]
    assert ["preprocessing", "0.800", "1.000", "4", "8.00", "4", "20.0"] in words
    assert ["KV", "cache,", "tokens", "500", "5000", "6000", "2"] in words
    assert ["media", "buffer,", "MB", "1.8", "18.0", "1073.7", "1"] in words
    assert ["generation", "to", "encoder", "1.100", "11.000"] in words


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ("{", "Invalid JSON"),
        (with_load(answered=0), "by_pruning.0.answered: Input should be gr"),
        (with_load(services=bench_result()["by_pruning"][0]["services"][:2]), "no metrics of generation"),
        (with_load(services=[{"service": "encoder"}]), "by_pruning.0.services.0.busy_s: Field required"),
        ({**bench_result(), "by_pruning": bench_result()["by_pruning"] * 2}, "by_pruning: List should have at most 1"),
    ],
)
def test_an_incomplete_result_is_rejected_by_its_field(capacity: Callable[..., Result], result: Any, told: str) -> None:
    refused = capacity(result, *LOADED)
    assert refused.exit_code == 1
    assert refused.stderr.startswith("INVALID_REQUEST: ")
    assert f"bench.json: {told}" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--requests-per-s", "nan"], "--requests-per-s must be above 0"),
        (["--requests-per-s", "1", "--utilisation", "1.5"], "--utilisation must be above 0 and at most 1, got 1.5"),
    ],
)
def test_invalid_flags_are_wrong_usage(capacity: Callable[..., Result], flags: list[str], told: str) -> None:
    wrong = capacity(bench_result(), *flags)
    assert wrong.exit_code == 2
    assert told in wrong.stderr.replace("\n", " ")
