"""The autoscalers of `deploy/kubernetes` read metrics of real services by the rules of prometheus-adapter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gridsieve.bench.metrics import read_metrics
from tests.deploy.kustomization import build
from tests.integration.fleet import Stack

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"


@pytest.fixture(scope="module")
def scalers() -> list[Any]:
    """The specs of the autoscalers."""
    return [each["spec"] for each in build(FOLDER / "base") if each["kind"] == "HorizontalPodAutoscaler"]


@pytest.fixture(scope="module")
def rules() -> list[Any]:
    return yaml.safe_load((FOLDER / "components" / "monitoring" / "adapter.yaml").read_text())["rules"]["custom"]


def served_by(rules: list[Any], name: str) -> Any:
    """The one rule of the adapter that serves a metric of this name."""

    def serves(rule: Any) -> bool:
        pattern = re.search(r'__name__=~"([^"]+)"', rule["seriesQuery"])
        return bool(re.fullmatch(pattern[1], name)) if pattern else bool(rule["name"]["as"] == name)

    (rule,) = filter(serves, rules)
    return rule


def test_each_autoscaler_scales_its_deployment(scalers: list[Any]) -> None:
    deployments = [each for each in build(FOLDER / "base") if each["kind"] == "Deployment"]
    assert not [each for each in deployments if "replicas" in each["spec"]]
    targets = sorted(spec["scaleTargetRef"]["name"] for spec in scalers)
    assert targets == sorted(each["metadata"]["name"] for each in deployments)
    assert all(2 <= spec["minReplicas"] < spec["maxReplicas"] for spec in scalers)  # one serves while one is replaced


async def test_every_series_of_an_autoscaler_is_served_by_a_rule_and_exported_by_a_service(
    scalers: list[Any], rules: list[Any], stack: Stack
) -> None:
    samples: dict[str, set[tuple[str, str]]] = {}
    for each in await read_metrics([f"127.0.0.1:{port}" for port in stack.metrics_ports.values()]):
        for name, labels in each:
            samples.setdefault(name, set()).update(labels)
    metrics = [each["pods"]["metric"] for spec in scalers for each in spec["metrics"] if each["type"] == "Pods"]
    assert len(metrics) == 5
    for metric in metrics:
        rule = served_by(rules, metric["name"])
        assert 'namespace!="",pod!=""' in rule["seriesQuery"]
        queries = f"{rule['seriesQuery']} {rule['metricsQuery']}"
        queried = re.findall(r"gridsieve_\w+", queries) if "name" in rule else [metric["name"]]
        assert [name for name in queried if name not in samples] == []
        assert metric.get("selector", {}).get("matchLabels", {}).items() <= samples[queried[0]]
        assert set(re.findall(r'(stage)="(\w+)"', queries)) <= samples[queried[0]]
