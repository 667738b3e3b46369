"""`deploy/grafana`: the dashboard is what its source makes, is well-formed, and has the alerts' limits."""

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


def named(panel: Any) -> str:
    return str(panel["title"])


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


def test_the_dashboard_is_what_its_source_makes() -> None:
    assert dashboard.rendered() == dashboard.PATH.read_text(), "run: python -m deploy.grafana.dashboard"


def test_rows_and_panels_have_their_own_numbers_and_places() -> None:
    numbers = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(numbers)) == len(numbers) == len(ROWS) + len(PANELS)
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    assert all(0 <= place["x"] < place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


@pytest.mark.parametrize("panel", PANELS, ids=named)
def test_each_panel_says_what_it_shows_in_which_unit_and_of_whom(panel: Any) -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert panel["datasource"] == {"type": source["type"], "uid": source["uid"]}
    assert panel["description"].endswith(".")
    assert panel["type"] == "table" or panel["fieldConfig"]["defaults"]["unit"]
    letters = [target["refId"] for target in panel["targets"]]
    assert letters
    assert len(set(letters)) == len(letters)
    assert all(target["expr"] for target in panel["targets"])


def test_the_first_row_fits_a_screen_and_tells_the_stages_apart() -> None:
    first = [panel for panel in PANELS if panel["gridPos"]["y"] < ROWS[1]["gridPos"]["y"]]
    assert ROWS[0]["title"] == "Is it well, and if not, which stage?"
    assert ROWS[1]["gridPos"]["y"] <= 14
    assert [panel["type"] for panel in first] == ["stat"] * 7 + ["timeseries", "bargauge"]


# --- alerts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("panel", [panel for panel in PANELS if limits(panel) and alerts_of(panel)], ids=named)
def test_limits_are_those_of_the_alerts(panel: Any) -> None:
    for alert in alerts_of(panel):
        assert limits(panel) & compared(alert), alert
    assert limits(panel) <= set().union(*map(compared, alerts_of(panel)))


@pytest.mark.parametrize("alert", ALERTS)
def test_what_each_alert_watches_can_be_seen(alert: str) -> None:
    assert [panel for panel in PANELS if alert in alerts_of(panel)]


def test_panels_name_alerts_that_there_are() -> None:
    assert {alert for panel in PANELS for alert in alerts_of(panel)} == ALERTS.keys()


# --- provisioning ---------------------------------------------------------------------------------------------------


def test_compose_gives_grafana_the_dashboard_and_its_data(grafana: Any) -> None:
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "framesieve.yml").read_text())["providers"]
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    mounted = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    for kind in ("datasources", "dashboards"):
        assert mounted[f"./deploy/grafana/provisioning/{kind}"] == f"/etc/grafana/provisioning/{kind}"
    assert mounted["./deploy/grafana/dashboards"] == provider["options"]["path"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{dashboard.PATH.name}"
    assert source["url"] == "http://prometheus:9090"


def test_compose_lets_grafana_be_seen_here_alone_and_changed_by_nobody(grafana: Any) -> None:
    assert grafana["ports"] == ["127.0.0.1:3000:3000"]
    assert (grafana["read_only"], grafana["cap_drop"]) == (True, ["ALL"])
    environment = grafana["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert BOARD["editable"] is False


def test_the_library_writes_for_the_grafana_that_runs(grafana: Any) -> None:
    written_for = version("grafana-foundation-sdk").partition("!")[2].rpartition(".")[0]
    assert grafana["image"].partition(":")[2].rpartition(".")[0] == written_for
