"""The rules of `deploy/prometheus`: promtool's tests, the alerts' annotations, and their sections in the runbook."""

from __future__ import annotations

import re
import subprocess

import yaml

from tests.deploy.kustomization import build
from tests.deploy.services import ROOT, SETTINGS, compose
from tests.rules import ALERTS, FOLDER, RECORDS, TESTS, TOPICS

RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()


def test_the_configuration_is_valid_and_the_rules_pass_their_tests(promtool: str) -> None:
    tests = [str(FOLDER / "tests" / f"{topic}.yml") for topic in TOPICS]
    config = ["check", "config", "--lint-fatal", str(FOLDER / "prometheus.yml")]
    for arguments in (config, ["test", "rules", *tests]):
        ran = subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert arguments is not config or f"{len(TOPICS)} rule files found" in ran.stdout


def test_each_alert_is_tested_to_fire_and_not_to_fire_and_each_record_to_have_a_value() -> None:
    outcomes = {
        (case["alertname"], bool(case["exp_alerts"])) for test in TESTS for case in test.get("alert_rule_test", ())
    }
    assert outcomes == {(alert, fires) for alert in ALERTS for fires in (True, False)}
    cases = [case for test in TESTS for case in test.get("promql_expr_test", ()) if case["exp_samples"]]
    records = {rule["record"] for rule in RECORDS}
    assert {each for each in records if not any(re.search(rf"{each}\b", case["expr"]) for case in cases)} == set()


def test_each_alert_has_a_severity_and_a_section_of_the_runbook() -> None:
    assert re.findall(r"^## (.*)$", RUNBOOK, re.MULTILINE) == list(ALERTS)
    for alert, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("critical", "warning"), alert
        place = '{{ or $externalLabels.runbook "docs/runbook.md" }}'
        assert rule["annotations"]["runbook_url"] == f"{place}#{alert.lower()}"


def test_flags_in_the_runbook_exist() -> None:
    flags = {f"--{field.replace('_', '-')}" for each in SETTINGS.values() for field in each.model_fields}
    assert set(re.findall(r"`(--[a-z-]+)`", RUNBOOK)) <= flags


def test_prometheus_scrapes_the_services_of_compose_and_names_jobs_as_in_kubernetes() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    scraped = {each["job_name"]: each["static_configs"] for each in config["scrape_configs"]}
    ports = {name: each.model_fields["metrics_port"].default for name, each in SETTINGS.items()} | {"gateway": 8000}
    assert scraped == {name: [{"targets": [f"{name}:{port}"]}] for name, port in ports.items()}
    folder = ROOT / "deploy" / "kubernetes"
    monitor = yaml.safe_load((folder / "components" / "monitoring" / "scraping.yaml").read_text())
    deployments = [each for each in build(folder / "base") if each["kind"] == "Deployment"]
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in deployments]
    assert {each[monitor["spec"]["jobLabel"]] for each in labels} == set(scraped)


def test_compose_mounts_the_configuration_of_prometheus() -> None:
    service = compose()["prometheus"]
    assert "./deploy/prometheus:/etc/prometheus:ro" in service["volumes"]
    assert "--config.file=/etc/prometheus/prometheus.yml" in service["command"]
