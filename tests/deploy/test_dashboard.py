"""`deploy/grafana`: the dashboard is generated from its source, well-formed, and has the alerts' limits."""

from __future__ import annotations

import itertools
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana import dashboard
from tests.rules import ALERTS

ROOT = Path(__file__).parents[2]
PROVISIONING = ROOT / "deploy" / "grafana" / "provisioning"
BOARD = json.loads(dashboard.PATH.read_text())
ROWS = [panel for panel in BOARD["panels"] if panel["type"] == "row"]
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


@pytest.fixture
def grafana() -> Any:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["grafana"]


def alerts_of(panel: Any) -> list[str]:
    return re.findall(r"Framesieve\w+", panel["description"])


def limits(panel: Any) -> set[float]:
    steps = panel.get("fieldConfig", {}).get("defaults", {}).get("thresholds", {}).get("steps", [])
    return {step["value"] for step in steps if step["value"] is not None}


def compared(alert: str) -> set[float]:
    return {float(number) for number in re.findall(r"(?:[<>]=?|==) ([\d.]+)", ALERTS[alert]["expr"])}


# --- form -----------------------------------------------------------------------------------------------------------


def test_the_dashboard_is_generated_from_its_source() -> None:
    assert dashboard.rendered() == dashboard.PATH.read_text(), "run: python -m deploy.grafana.dashboard"


def test_rows_and_panels_have_distinct_ids_and_do_not_overlap() -> None:
    numbers = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(numbers)) == len(numbers) == len(ROWS) + len(PANELS)
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    assert all(0 <= place["x"] < place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


def test_each_panel_has_a_description_a_unit_a_data_source_and_queries() -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    for panel in PANELS:
        assert panel["datasource"] == {"type": source["type"], "uid": source["uid"]}
        assert panel["description"].endswith("."), panel["title"]
        assert panel["type"] == "table" or panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert letters
        assert len(set(letters)) == len(letters)
        assert all(target["expr"] for target in panel["targets"]), panel["title"]


def test_the_first_row_fits_a_screen() -> None:
    first = [panel for panel in PANELS if panel["gridPos"]["y"] < ROWS[1]["gridPos"]["y"]]
    assert ROWS[0]["title"] == "Is it well, and if not, which stage?"
    assert ROWS[1]["gridPos"]["y"] <= 14
    assert [panel["type"] for panel in first] == ["stat"] * 7 + ["timeseries", "bargauge"]


# --- alerts ---------------------------------------------------------------------------------------------------------


def test_limits_of_panels_are_those_of_their_alerts() -> None:
    for panel in PANELS:
        if limits(panel) and alerts_of(panel):
            for alert in alerts_of(panel):
                assert limits(panel) & compared(alert), alert
            assert limits(panel) <= set().union(*map(compared, alerts_of(panel))), panel["title"]


def test_every_alert_has_a_panel_and_every_named_alert_exists() -> None:
    assert {alert for panel in PANELS for alert in alerts_of(panel)} == ALERTS.keys()


# --- provisioning ---------------------------------------------------------------------------------------------------


def test_compose_mounts_the_dashboard_and_its_data_source(grafana: Any) -> None:
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "framesieve.yml").read_text())["providers"]
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    mounted = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    for kind in ("datasources", "dashboards"):
        assert mounted[f"./deploy/grafana/provisioning/{kind}"] == f"/etc/grafana/provisioning/{kind}"
    assert mounted["./deploy/grafana/dashboards"] == provider["options"]["path"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{dashboard.PATH.name}"
    assert source["url"] == "http://prometheus:9090"


def test_grafana_listens_on_loopback_and_is_read_only(grafana: Any) -> None:
    assert grafana["ports"] == ["127.0.0.1:3000:3000"]
    assert (grafana["read_only"], grafana["cap_drop"]) == (True, ["ALL"])
    environment = grafana["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert BOARD["editable"] is False


def test_the_library_writes_for_the_version_of_grafana_in_compose(grafana: Any) -> None:
    written_for = version("grafana-foundation-sdk").partition("!")[2].rpartition(".")[0]
    assert grafana["image"].partition(":")[2].rpartition(".")[0] == written_for
