"""The rules of `deploy/prometheus`: promtool's tests, the alerts' annotations, and their sections in the runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import yaml

from common.serving.settings import ServiceSettings
from common.telemetry.metrics import FINE_SECONDS_BUCKETS, SECONDS_BUCKETS
from services.encoder.settings import EncoderSettings
from services.generation.settings import GenerationSettings
from services.preprocessing.settings import PreprocessingSettings
from tests.deploy.kustomization import build
from tests.rules import ALERTS, FOLDER, RECORDS, TESTS, TOPICS

ROOT = Path(__file__).parents[2]
RUNBOOK = ROOT / "docs" / "runbook.md"
SETTINGS: Mapping[str, type[ServiceSettings]] = {
    "preprocessing": PreprocessingSettings,
    "encoder": EncoderSettings,
    "generation": GenerationSettings,
}


def run(promtool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=60)


def test_the_configuration_is_valid_and_the_rules_pass_their_tests(promtool: str) -> None:
    checked = run(promtool, "check", "config", "--lint-fatal", str(FOLDER / "prometheus.yml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(TOPICS)} rule files found" in checked.stdout
    tested = run(promtool, "test", "rules", *(str(FOLDER / "tests" / f"{topic}.yml") for topic in TOPICS))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_a_changed_rule_fails_its_tests(promtool: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    rules = tmp_path / "rules" / "latency.yml"
    rules.write_text(rules.read_text().replace("p99_5m > 10", "p99_5m > 20"))
    tested = run(promtool, "test", "rules", str(tmp_path / "tests" / "latency.yml"))
    assert tested.returncode != 0
    assert "FramesieveFirstTokenSlow" in tested.stdout + tested.stderr


def test_each_alert_is_tested_to_fire_and_not_to_fire_and_each_record_to_have_a_value() -> None:
    outcomes = {
        (case["alertname"], bool(case["exp_alerts"])) for test in TESTS for case in test.get("alert_rule_test", ())
    }
    assert outcomes == {(alert, fires) for alert in ALERTS for fires in (True, False)}
    cases = [case for test in TESTS for case in test.get("promql_expr_test", ()) if case["exp_samples"]]
    records = {rule["record"] for rule in RECORDS}
    assert {each for each in records if not any(re.search(rf"{each}\b", case["expr"]) for case in cases)} == set()


def test_each_alert_has_a_severity_and_names_its_section_of_the_runbook() -> None:
    for alert, rule in ALERTS.items():
        assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"}), alert
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}, alert
        assert rule["annotations"]["runbook"] == f"docs/runbook.md, section {alert}"


def test_the_runbook_has_one_section_per_alert() -> None:
    sections = re.split(r"^## ", RUNBOOK.read_text(), flags=re.MULTILINE)[1:]
    assert [section.splitlines()[0] for section in sections] == list(ALERTS)
    for section in sections:
        for part in ("It means", "Look at", "Do"):
            assert f"\n**{part}** " in section, section.splitlines()[0]


def test_flags_in_the_runbook_exist() -> None:
    flags = {f"--{field.replace('_', '-')}" for each in SETTINGS.values() for field in each.model_fields}
    assert set(re.findall(r"`(--[a-z-]+)`", RUNBOOK.read_text())) <= flags


def test_limits_of_percentiles_are_bounds_of_histogram_buckets() -> None:
    compared = {
        alert: float(found[1])
        for alert, rule in ALERTS.items()
        if (found := re.search(r":p\d+_5m > ([\d.]+)", rule["expr"]))
    }
    assert compared.keys() == {"FramesieveFirstTokenSlow", "FramesieveTokensSlow"}
    assert compared["FramesieveFirstTokenSlow"] in SECONDS_BUCKETS
    assert compared["FramesieveTokensSlow"] in FINE_SECONDS_BUCKETS


def test_prometheus_scrapes_the_services_of_compose() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    scraped = {each["job_name"]: each["static_configs"] for each in config["scrape_configs"]}
    assert scraped == {
        name: [{"targets": [f"{name}:{each.model_fields['metrics_port'].default}"]}] for name, each in SETTINGS.items()
    }


def test_jobs_have_the_same_names_in_kubernetes() -> None:
    folder = ROOT / "deploy" / "kubernetes"
    monitor = yaml.safe_load((folder / "components" / "monitoring" / "scraping.yaml").read_text())
    deployments = [each for each in build(folder / "base") if each["kind"] == "Deployment"]
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in deployments]
    assert {each[monitor["spec"]["jobLabel"]] for each in labels} == set(SETTINGS)


def test_compose_mounts_the_configuration_of_prometheus() -> None:
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["prometheus"]
    assert "./deploy/prometheus:/etc/prometheus:ro" in service["volumes"]
    assert "--config.file=/etc/prometheus/prometheus.yml" in service["command"]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["ports"] == ["127.0.0.1:9090:9090"]
