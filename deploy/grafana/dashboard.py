"""Writes dashboards/gridsieve.json, which Grafana is provisioned with: python -m deploy.grafana.dashboard

The first row shows whether all is well and, if not, which stage to look at; the other rows have the details. Limits are
those of the alert rules in deploy/prometheus; a test compares them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders.dashboard import Dashboard, QueryVariable, Row
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    VariableOption,
    VariableRefresh,
)

from deploy.grafana import costs, overview, services
from deploy.grafana.panels import SOURCE
from deploy.grafana.queries import JOBS

COLUMNS = 100
PATH = Path(__file__).parent / "dashboards" / "gridsieve.json"

ROWS = {
    "Health, and the stage at fault": overview.well,
    "Requests": overview.requests,
    "Latency": overview.latency,
    "Preprocessing": services.preprocessing,
    "Encoder": services.encoder,
    "Generation": services.generation,
    "Cameras": services.cameras,
    "Pruning": costs.pruning,
    "Caches": costs.caches,
    "Bytes": costs.hops,
    "Processes": costs.processes,
}


def rendered() -> str:
    """The dashboard as JSON."""
    instances = (
        QueryVariable("instance")
        .label("Instance")
        .datasource(SOURCE)
        .query(f"label_values(up{{{JOBS}}}, instance)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(text="All", value="$__all"))
    )
    dashboard = (
        Dashboard("Gridsieve")
        .uid("gridsieve")
        .tags(["gridsieve"])
        .readonly()
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(instances)
    )
    for title, panels in ROWS.items():
        dashboard.with_row(Row(title))
        for panel in panels():
            dashboard.with_panel(panel)
    built = dashboard.build()
    for number, each in enumerate(built.panels or (), start=1):
        each.id_val = number
    return _laid_out(json.loads(json.dumps(built, cls=JSONEncoder))) + "\n"


def _laid_out(value: Any, indent: str = "") -> str:
    """JSON with every value that fits on one line, so that panels and their diffs are readable."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(line) <= COLUMNS or not isinstance(value, dict | list):
        return line
    deeper = indent + "  "
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {_laid_out(each, deeper)}" for key, each in value.items()]
    else:
        entries = [_laid_out(each, deeper) for each in value]
    opened, closed = "{}" if isinstance(value, dict) else "[]"
    return f"{opened}\n{deeper}" + f",\n{deeper}".join(entries) + f"\n{indent}{closed}"


if __name__ == "__main__":
    PATH.write_text(rendered())
