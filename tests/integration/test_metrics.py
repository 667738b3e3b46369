"""Metrics of three real processes: well-formed, documented, and consistent with each other."""

from __future__ import annotations

import asyncio
import re
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from common.contract import errors
from framesieve.cli.launcher import SERVICES, LocalStack
from framesieve.client.answer import STAGES, Answer, Delta
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Image, Part, Video
from tests import media
from tests.integration.conftest import idle, settles
from tests.integration.fleet import READ_S

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
FIRST_TOKEN = "framesieve_generation_time_to_first_token_seconds"
STAGE = "framesieve_generation_stage_seconds"

Labels = Mapping[str, frozenset[str]]


def exported(stack: LocalStack, service: str) -> str:
    url = f"http://127.0.0.1:{stack.metrics_ports[service]}/metrics"
    with urllib.request.urlopen(url, timeout=READ_S) as answer:
        text: str = answer.read().decode()
    return text


def families(stack: LocalStack, service: str) -> dict[str, Metric]:
    """Metrics of the product by the name that queries use: counters end with _total."""
    found = text_string_to_metric_families(exported(stack, service))
    ours = (family for family in found if family.name.startswith("framesieve_"))
    return {family.name + ("_total" if family.type == "counter" else ""): family for family in ours}


def values(stack: LocalStack, service: str, sample_name: str) -> dict[tuple[str, ...], float]:
    """Samples by the values of their labels, in the order of the label names."""
    samples = (sample for family in families(stack, service).values() for sample in family.samples)
    return {tuple(sample.labels.values()): sample.value for sample in samples if sample.name == sample_name}


# --- form -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", SERVICES)
def test_promtool_finds_no_fault(stack: LocalStack, promtool: str, service: str) -> None:
    check = subprocess.run(
        [promtool, "check", "metrics"], input=exported(stack, service), capture_output=True, text=True, timeout=30
    )
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
def test_the_documentation_lists_exactly_the_exported_metrics_and_labels(stack: LocalStack, service: str) -> None:
    """Other tests of the stack have sent all kinds of requests: nothing of those may become a label."""
    listed = documented(service)
    found = {
        name: seen(family, {label for label, each in listed.get(name, ("", {}))[1].items() if not each})
        for name, family in families(stack, service).items()
    }
    assert found == listed
    assert all(family.documentation for family in families(stack, service).values())


# --- sums -------------------------------------------------------------------------------------------------------


async def leaves(client: FramesieveClient, seed: int) -> None:
    """Asks and disconnects after the first token."""
    async for event in client.stream(Video(data=media.clip(seed=seed)), "What moves?", max_new_tokens=500, stop=["\0"]):
        if isinstance(event, Delta):
            return


async def is_refused(client: FramesieveClient) -> None:
    with pytest.raises(errors.MediaRejected):
        await client.ask(Video(data=b"no film"), "What moves?")


def sums(stack: LocalStack) -> dict[str, float]:
    stages = values(stack, "generation", f"{STAGE}_sum")
    return {stage: seconds for (stage,), seconds in stages.items()} | {
        "whole": values(stack, "generation", f"{FIRST_TOKEN}_sum")[()],
        "count": values(stack, "generation", f"{FIRST_TOKEN}_count")[()],
        "prefixes": sum(values(stack, "generation", "framesieve_generation_prefix_lookups_total").values()),
    }


async def test_stages_sum_to_the_time_to_first_token_over_a_mixed_load(
    stack: LocalStack, client: FramesieveClient
) -> None:
    async def ask(*parts: Part, **options: int | float) -> Answer:
        return await client.ask(list(parts) or None, "What moves?", max_new_tokens=4, **options)  # type: ignore[arg-type]

    clip, picture = Video(data=media.clip(seed=901)), Image(data=media.picture(112, 84))
    assert await settles(lambda: values(stack, "generation", "framesieve_requests_running")[("Generate",)], 0)
    before = sums(stack)
    gone = [leaves(client, seed) for seed in (902, 903)]
    asked = [ask(), ask(picture), ask(clip), ask(clip, picture, pruning_rate=0.5), ask(clip, n=3, temperature=1.0)]
    answers = [each for each in await asyncio.gather(*asked, *gone, is_refused(client)) if isinstance(each, Answer)]
    answers += [await ask(clip), await ask(clip, pruning_rate=0.75)]  # a prefix cache hit; cached embeddings
    assert await settles(lambda: values(stack, "generation", "framesieve_requests_running")[("Generate",)], 0)
    grown = {name: seconds - before[name] for name, seconds in sums(stack).items()}
    assert grown["count"] == grown["prefixes"] == len(answers) + len(gone)
    assert sum(grown[stage] for stage in STAGES) == pytest.approx(grown["whole"], abs=1e-6)
    answered = {stage: sum(answer.timings.stages_s[stage] for answer in answers) for stage in STAGES}
    assert all(answered[stage] <= grown[stage] + 1e-6 for stage in STAGES)
    for answer in answers:
        stages_s = answer.timings.stages_s
        assert sum(stages_s.values()) == pytest.approx(answer.timings.time_to_first_token_s, abs=1e-9)


async def test_a_stage_that_is_skipped_takes_no_time(client: FramesieveClient) -> None:
    async def took(*parts: Part, rate: float = 0.0) -> set[str]:
        answer = await client.ask(list(parts) or None, "What moves?", max_new_tokens=1, pruning_rate=rate)
        return {stage for stage, seconds in answer.timings.stages_s.items() if seconds > 0}

    clip = Video(data=media.clip(16, fps=4, seed=911))
    text = {"plan", "wait_for_prefill", "prefill"}
    of_media = {"decode", "resize", "wait_for_encoder", "encode", "prune", "transfer"}
    assert await took() == text
    assert await took(clip, rate=0.5) == text | of_media
    assert await took(clip, rate=0.25) == text | {"wait_for_encoder", "prune", "transfer"}  # cached embeddings
    assert await took(clip, rate=0.5) == text  # a prefix cache hit


async def test_each_stage_is_counted_by_the_service_that_runs_it(stack: LocalStack, client: FramesieveClient) -> None:
    def busy() -> dict[tuple[str, str], float]:
        name = "framesieve_stage_busy_seconds_count"
        found = {service: values(stack, service, name) for service in SERVICES}
        return {(service, stage): count for service, each in found.items() for (stage,), count in each.items()}

    await idle(stack)
    before = busy()
    await client.ask(Video(data=media.clip(seed=921)), "What moves?", max_new_tokens=1, pruning_rate=0.5)
    await idle(stack)
    after = busy()
    assert {which for which, count in after.items() if count > before[which]} == {
        ("preprocessing", "plan"),
        ("preprocessing", "decode"),
        ("preprocessing", "resize"),
        ("encoder", "encode"),
        ("encoder", "prune"),
        ("generation", "transfer"),
        ("generation", "prefill"),
    }


async def test_bytes_are_counted_at_every_hop(stack: LocalStack, client: FramesieveClient) -> None:
    def crossed() -> dict[tuple[str, ...], float]:
        name = "framesieve_message_bytes_total"
        return {key: value for service in SERVICES for key, value in values(stack, service, name).items()}

    await idle(stack)
    data, before = media.clip(seed=931), crossed()
    answer = await client.ask(Video(data=data), "What moves?", max_new_tokens=1)
    await idle(stack)
    grown = {key: value - before[key] for key, value in crossed().items()}
    (item,) = answer.usage.media
    for method in ("Generate", "Encode", "Preprocess"):
        assert len(data) < grown["received", method] < len(data) + 2000
    frames_bytes = item.grid.t * 2 * item.grid.h * item.grid.w * 28 * 28 * 3
    assert frames_bytes < grown["sent", "Preprocess"] < frames_bytes + 8000
    assert item.kept_tokens * 64 * 4 < grown["sent", "Encode"] < item.kept_tokens * 64 * 4 + 8000
    assert 0 < grown["sent", "Generate"] < 2000
