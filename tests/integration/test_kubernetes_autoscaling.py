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
from tests.deploy.kustomization import build

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
    scalers: list[Any], rules: list[Any], stack: LocalStack
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
        queried = re.findall(r"framesieve_\w+", queries) if "name" in rule else [metric["name"]]
        assert [name for name in queried if name not in samples] == []
        assert metric.get("selector", {}).get("matchLabels", {}).items() <= samples[queried[0]]
        assert set(re.findall(r'(stage)="(\w+)"', queries)) <= samples[queried[0]]


def test_queries_compute_what_their_names_say(promtool: str, rules: list[Any], tmp_path: Path) -> None:
    """Pod a: 30 of 40 blocks used, its tower busy half of the time, media waiting for workers. Pod b is idle."""
    oldest, blocks = "framesieve_preprocessing_queue_oldest_seconds", "framesieve_generation_kv_blocks"
    spent = "framesieve_stage_busy_seconds_sum"
    series = {
        f'{oldest}{{pod="a",pool="decode"}}': "2+0x10",
        f'{oldest}{{pod="a",pool="read"}}': "9+0x10",
        f'{oldest}{{pod="b",pool="decode"}}': "0+0x10",
        f'{spent}{{pod="a",stage="encode"}}': "0+30x10",
        f'{spent}{{pod="a",stage="prune"}}': "0+60x10",
        f'{spent}{{pod="b",stage="encode"}}': "5+0x10",
        f'{blocks}_used{{pod="a"}}': "30+0x10",
        f'{blocks}_used{{pod="b"}}': "0+0x10",
        f'{blocks}{{pod="a"}}': "40+0x10",
        f'{blocks}{{pod="b"}}': "40+0x10",
    }

    def check(metric: str, series: str, a: float, selector: str = "") -> dict[str, Any]:
        """That the query of the adapter for two pods gives `a` for pod a and 0 for pod b."""
        query: str = served_by(rules, metric)["metricsQuery"]
        query = query.replace("<<.Series>>", series).replace("<<.LabelMatchers>>", f'pod=~"a|b"{selector}')
        values = [{"labels": f'{{pod="{pod}"}}', "value": value} for pod, value in (("a", a), ("b", 0))]
        return {"expr": query.replace("<<.GroupBy>>", "pod"), "eval_time": "8m", "exp_samples": values}

    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            check(oldest, oldest, 2, ',pool="decode"'),
            check("framesieve_encoder_busy_ratio", spent, 0.5),
            check("framesieve_generation_kv_used_ratio", f"{blocks}_used", 0.75),
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"tests": [test]}))
    command = [promtool, "test", "rules", "test.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
