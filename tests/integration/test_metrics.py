"""Metrics of three real processes: well-formed, documented, and consistent with each other."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gridsieve.cli.launcher import SERVICES
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Video
from tests import media
from tests.integration.conftest import idle
from tests.integration.fleet import Stack, exported

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"

Labels = Mapping[str, frozenset[str]]


def families(text: str) -> dict[str, Metric]:
    """Metrics of the product by the name that queries use: counters end with _total."""
    found = text_string_to_metric_families(text)
    ours = (family for family in found if family.name.startswith("gridsieve_"))
    return {family.name + ("_total" if family.type == "counter" else ""): family for family in ours}


@pytest.mark.parametrize("service", SERVICES)
def test_promtool_finds_no_fault(stack: Stack, promtool: str, service: str) -> None:
    text = exported(stack.metrics_ports[service])
    check = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30)
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


# --- documentation ----------------------------------------------------------------------------------------------


def documented(service: str) -> dict[str, tuple[str, Labels]]:
    """Type and labels of each metric in the table of the service. A label in brackets takes any value: an empty set."""
    section = DOCS.read_text().split(f"\n## {service.capitalize()}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", section, re.MULTILINE)
    return {name: (kind, dict(_labels(labels))) for name, kind, labels in rows}


def _labels(text: str) -> Iterator[tuple[str, frozenset[str]]]:
    for each in re.findall(r"`(\w+)` \(", text):
        yield each, frozenset()
    for each, listed in re.findall(r"`(\w+)`: ([\w, ]+)", text):
        yield each, frozenset(listed.split(", "))


def seen(family: Metric, bracketed: set[str]) -> tuple[str, Labels]:
    found: dict[str, set[str]] = {}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if label != "le":
                found.setdefault(label, set()).update(() if label in bracketed else (value,))
    return family.type, {label: frozenset(each) for label, each in found.items()}


@pytest.mark.parametrize("service", SERVICES)
def test_the_documentation_lists_exactly_the_exported_metrics_and_labels(stack: Stack, service: str) -> None:
    """Other tests of the stack have sent all kinds of requests: nothing of those may become a label."""
    text = exported(stack.metrics_ports[service])
    assert_documented(service, text)
    assert all(family.documentation for family in families(text).values())


def assert_documented(service: str, text: str) -> None:
    listed = documented(service)
    found = {
        name: seen(family, {label for label, each in listed.get(name, ("", {}))[1].items() if not each})
        for name, family in families(text).items()
        if family.samples  # those of a shared module that the service has no part in have none
    }
    assert found == listed


# --- values -----------------------------------------------------------------------------------------------------


async def test_a_question_is_counted_by_each_service_in_its_stages_and_bytes(
    stack: Stack, client: GridsieveClient
) -> None:
    def counted() -> dict[tuple[str, str], float]:
        """Runs of each stage by service; bytes by direction and method."""
        found: dict[tuple[str, str], float] = {}
        for service in SERVICES:
            own = families(exported(stack.metrics_ports[service]))
            stages = [each for each in own["gridsieve_stage_busy_seconds"].samples if each.name.endswith("_count")]
            found |= {(service, each.labels["stage"]): each.value for each in stages}
            crossed = own["gridsieve_message_bytes_total"].samples
            found |= {(each.labels["direction"], each.labels["method"]): each.value for each in crossed}
        return found

    await idle(stack)
    data, before = media.clip(seed=931), counted()
    answer = await client.ask(Video(data=data), "What moves?", max_new_tokens=1, pruning_rate=0.5, pruning_method="evs")
    await idle(stack)
    grown = {which: after - before[which] for which, after in counted().items()}
    assert {which for which, count in grown.items() if which[0] in SERVICES and count} == {
        *(("preprocessing", stage) for stage in ("plan", "decode", "resize")),
        *(("encoder", stage) for stage in ("encode", "prune")),
        *(("generation", stage) for stage in ("transfer", "prefill")),
    }
    (item,) = answer.usage.media
    for method in ("Generate", "Encode", "Preprocess"):
        assert len(data) < grown["received", method] < len(data) + 2000
    frames_bytes = item.grid.t * 2 * item.grid.h * item.grid.w * 28 * 28 * 3
    assert frames_bytes < grown["sent", "Preprocess"] < frames_bytes + 8000
    assert item.num_kept * 64 * 4 < grown["sent", "Encode"] < item.num_kept * 64 * 4 + 8000
    assert 0 < grown["sent", "Generate"] < 2000
