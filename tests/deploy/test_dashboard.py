"""`deploy/grafana`: the dashboard is generated from its source, has the alerts' limits, and is provisioned safely."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from deploy.grafana import dashboard
from tests.deploy.services import ROOT, compose
from tests.rules import ALERTS

PROVISIONING = ROOT / "deploy" / "grafana" / "provisioning"
BOARD = json.loads(dashboard.PATH.read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def alerts_of(panel: Any) -> list[str]:
    return re.findall(r"Gridsieve\w+", panel["description"])


def limits(panel: Any) -> set[float]:
    steps = panel.get("fieldConfig", {}).get("defaults", {}).get("thresholds", {}).get("steps", [])
    return {step["value"] for step in steps if step["value"] is not None}


def compared(alert: str) -> set[float]:
    return {float(number) for number in re.findall(r"(?:[<>]=?|==) ([\d.]+)", ALERTS[alert]["expr"])}


def test_the_dashboard_is_generated_from_its_source() -> None:
    assert dashboard.rendered() == dashboard.PATH.read_text(), "run: python -m deploy.grafana.dashboard"


def test_every_alert_has_a_panel_with_its_limits() -> None:
    assert {alert for panel in PANELS for alert in alerts_of(panel)} == ALERTS.keys()
    for panel in PANELS:
        if limits(panel) and alerts_of(panel):
            assert all(limits(panel) & compared(alert) for alert in alerts_of(panel)), panel["title"]
            assert limits(panel) <= set().union(*map(compared, alerts_of(panel))), panel["title"]


def test_compose_mounts_the_dashboard_and_its_data_source() -> None:
    grafana = compose()["grafana"]
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "gridsieve.yml").read_text())["providers"]
    mounted = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    for kind in ("datasources", "dashboards"):
        assert mounted[f"./deploy/grafana/provisioning/{kind}"] == f"/etc/grafana/provisioning/{kind}"
    assert mounted["./deploy/grafana/dashboards"] == provider["options"]["path"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{dashboard.PATH.name}"
    assert source["url"] == "http://prometheus:9090"


def test_visitors_of_grafana_only_view() -> None:
    environment = compose()["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
