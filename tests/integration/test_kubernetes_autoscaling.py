"""The autoscalers of `deploy/kubernetes` read metrics of real services by the rules of prometheus-adapter."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from framesieve.bench.metrics import read_metrics
from framesieve.cli.launcher import LocalStack
from tests.deploy.kustomization import Manifest, build

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
QUERY = re.compile(r"framesieve_\w+")


@pytest.fixture(scope="module")
def base() -> list[Manifest]:
    return build(FOLDER / "base")


@pytest.fixture(scope="module")
def rules() -> list[Any]:
    return yaml.safe_load((FOLDER / "components" / "monitoring" / "adapter.yaml").read_text())["rules"]["custom"]


def autoscalers(manifests: list[Manifest]) -> dict[str, Any]:
    return {each["metadata"]["name"]: each["spec"] for each in manifests if each["kind"] == "HorizontalPodAutoscaler"}


def pod_metrics(spec: Any) -> list[Any]:
    return [each["pods"]["metric"] for each in spec["metrics"] if each["type"] == "Pods"]


def served_by(rules: list[Any], name: str) -> list[Any]:
    """The rules of the adapter that serve a metric of this name."""
    return [
        rule
        for rule in rules
        if rule.get("name", {}).get("as") == name
        or ("name" not in rule and (pattern := named(rule["seriesQuery"])) and pattern.fullmatch(name))
    ]


def named(series_query: str) -> re.Pattern[str] | None:
    found = re.search(r'__name__=~"([^"]+)"', series_query)
    return found and re.compile(found[1])


def test_each_deployment_has_one_autoscaler_and_no_replicas_of_its_own(base: list[Manifest]) -> None:
    deployments = {each["metadata"]["name"]: each["spec"] for each in base if each["kind"] == "Deployment"}
    assert {spec["scaleTargetRef"]["name"] for spec in autoscalers(base).values()} == deployments.keys()
    for name, spec in autoscalers(base).items():
        assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
        assert "replicas" not in deployments[name]
        assert 2 <= spec["minReplicas"] < spec["maxReplicas"]  # one may be replaced while the other serves


def test_each_metric_is_served_by_one_rule(base: list[Manifest], rules: list[Any]) -> None:
    names = {metric["name"] for spec in autoscalers(base).values() for metric in pod_metrics(spec)}
    assert len(names) == 5
    for name in names:
        assert len(served_by(rules, name)) == 1, name
    for rule in rules:
        assert [name for name in names if rule in served_by(rules, name)], rule["seriesQuery"]


async def test_every_series_of_a_rule_is_exported_by_a_service(
    base: list[Manifest], rules: list[Any], stack: LocalStack
) -> None:
    samples: dict[str, set[tuple[str, str]]] = {}
    for each in await read_metrics([f"127.0.0.1:{port}" for port in stack.metrics_ports.values()]):
        for name, labels in each:
            samples.setdefault(name, set()).update(labels)
    for spec in autoscalers(base).values():
        for metric in pod_metrics(spec):
            (rule,) = served_by(rules, metric["name"])
            queried = QUERY.findall(f"{rule['seriesQuery']} {rule['metricsQuery']}") if "name" in rule else []
            for name in queried or [metric["name"]]:
                assert name in samples, f"no service exposes {name}"
            for label in metric.get("selector", {}).get("matchLabels", {}).items():
                assert label in samples[metric["name"]]
            for label in re.findall(r'(stage)="(\w+)"', rule["metricsQuery"]):
                assert label in samples[queried[0]]


def test_every_rule_selects_by_pod_and_keeps_the_selector_of_the_autoscaler(rules: list[Any]) -> None:
    for rule in rules:
        assert rule["resources"]["overrides"] == {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}
        assert 'namespace!="",pod!=""' in rule["seriesQuery"]
        assert rule["metricsQuery"].count("<<.Series>>") == 1
        assert rule["metricsQuery"].count("<<.LabelMatchers>>") == rule["metricsQuery"].count("{")
        assert "by (<<.GroupBy>>)" in rule["metricsQuery"]


def test_the_monitor_finds_the_port_that_pods_name() -> None:
    (monitor,) = yaml.safe_load_all((FOLDER / "components" / "monitoring" / "scraping.yaml").read_text())
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    pods = [each["spec"]["template"] for each in build(FOLDER / "base") if each["kind"] == "Deployment"]
    assert len(pods) == 3
    for pod in pods:
        assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert endpoint["port"] in {each["name"] for each in pod["spec"]["containers"][0]["ports"]}


# --- the values of queries ----------------------------------------------------------------------------------------


def queried(rule: Any, series: str, matchers: str = "") -> str:
    """The query of a rule as the adapter sends it for two pods; matchers: the selector of the autoscaler."""
    pods = f'namespace="framesieve",pod=~"a|b"{matchers}'
    query: str = rule["metricsQuery"]
    return query.replace("<<.Series>>", series).replace("<<.LabelMatchers>>", pods).replace("<<.GroupBy>>", "pod")


def test_queries_compute_what_their_names_say(promtool: str, rules: list[Any], tmp_path: Path) -> None:
    """Pod a: 30 of 40 blocks used, its tower busy half of the time, media waiting for workers. Pod b is idle."""
    oldest = "framesieve_preprocessing_queue_oldest_seconds"
    (age,), (busy,), (used,) = (
        served_by(rules, name)
        for name in (oldest, "framesieve_encoder_busy_ratio", "framesieve_generation_kv_used_ratio")
    )
    labels = 'namespace="framesieve",pod='
    held = "framesieve_generation_kv_blocks"
    spent = "framesieve_stage_busy_seconds_sum"
    series = {
        f'{oldest}{{{labels}"a",pool="decode"}}': "2+0x10",
        f'{oldest}{{{labels}"a",pool="read"}}': "9+0x10",
        f'{oldest}{{{labels}"b",pool="decode"}}': "0+0x10",
        f'{spent}{{{labels}"a",stage="encode"}}': "0+30x10",
        f'{spent}{{{labels}"a",stage="prune"}}': "0+60x10",
        f'{spent}{{{labels}"b",stage="encode"}}': "5+0x10",
        f'{held}_used{{{labels}"a"}}': "30+0x10",
        f'{held}_used{{{labels}"b"}}': "0+0x10",
        f'{held}{{{labels}"a"}}': "40+0x10",
        f'{held}{{{labels}"b"}}': "40+0x10",
    }
    expected = (
        (queried(age, oldest, ',pool="decode"'), 2, 0),
        (queried(busy, spent), 0.5, 0),
        (queried(used, f"{held}_used"), 0.75, 0),
    )
    test = {
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": query,
                        "eval_time": "8m",
                        "exp_samples": [{"labels": '{pod="a"}', "value": a}, {"labels": '{pod="b"}', "value": b}],
                    }
                    for query, a, b in expected
                ],
            }
        ]
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        [promtool, "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
