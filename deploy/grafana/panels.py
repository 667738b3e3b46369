"""The kinds of panels of the dashboard. They know nothing of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import TypeVar

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BigValueColorMode,
    BigValueGraphMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    DynamicConfigValue,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMapping,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="prometheus")
THIRD = 8  # of the 24 columns
HEIGHT = 7

Queries = Mapping[str, str]  # PromQL by legend, in which {{label}} is that label's value
Panel = stat.Panel | bargauge.Panel | timeseries.Panel | table.Panel

_P = TypeVar("_P", stat.Panel, bargauge.Panel, timeseries.Panel, table.Panel)
_LAST = common.ReduceDataOptions().calcs(["last"])


@dataclass(frozen=True, slots=True)
class Limit:
    """A value's upper limit, and the alerts that fire above it."""

    value: float
    alerts: tuple[str, ...] = ()
    color: str = "red"


def light(title: str, description: str, unit: str, queries: Queries, *limits: Limit, width: int = 3) -> stat.Panel:
    """A current value; the background colour shows whether it is within its limits."""
    panel = (
        _told(stat.Panel(), title, description, limits)
        .unit(unit)
        .no_value("–")
        .color_mode(BigValueColorMode.BACKGROUND if limits else BigValueColorMode.NONE)
        .graph_mode(BigValueGraphMode.NONE)
        .reduce_options(_LAST)
        .thresholds(_steps(limits))
        .span(width)
        .height(4)
    )
    return _asked(panel, queries, instant=True)


def switches(title: str, description: str, queries: Queries, limit: Limit, *, width: int) -> stat.Panel:
    """Zeros and ones as words: 0 is down, 1 is up."""
    words = {
        "0": ValueMappingResult(text="down", color="red"),
        "1": ValueMappingResult(text="up", color="green"),
    }
    mappings: list[ValueMapping] = [ValueMap(options=words)]
    return light(title, description, "none", queries, limit, width=width).mappings(mappings)


def bars(title: str, description: str, unit: str, queries: Queries, *limits: Limit, width: int) -> bargauge.Panel:
    """Current values side by side, scaled to the largest limit."""
    panel = (
        _told(bargauge.Panel(), title, description, limits)
        .unit(unit)
        .min(0)
        .max(max(each.value for each in limits))
        .orientation(VizOrientation.HORIZONTAL)
        .display_mode(BarGaugeDisplayMode.BASIC)
        .reduce_options(_LAST)
        .thresholds(_steps(limits))
        .span(width)
        .height(9)
    )
    return _asked(panel, queries, instant=True)


def lines(title: str, description: str, unit: str, queries: Queries, *limits: Limit) -> timeseries.Panel:
    """Values over time; limits as dashed lines."""
    panel = (
        _told(timeseries.Panel(), title, description, limits)
        .unit(unit)
        .min(0)
        .fill_opacity(0)
        .legend(common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
        .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
        .span(THIRD)
        .height(HEIGHT)
    )
    if limits:
        panel.thresholds(_steps(limits))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED))
    return _asked(panel, queries)


def stacked(title: str, description: str, unit: str, queries: Queries) -> timeseries.Panel:
    """Values over time, stacked in the order of the queries."""
    return (
        lines(title, description, unit, queries)
        .fill_opacity(60)
        .stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    )


def listed(title: str, description: str, queries: Queries) -> table.Panel:
    """Labels as a table; the values, which are all 1, are hidden."""
    panel = _told(table.Panel(), title, description, ()).span(THIRD).height(HEIGHT)
    hidden = DynamicConfigValue("custom.hidden", True)
    for column in ("Time", "Value", "__name__"):
        panel.override_by_name(column, [hidden])
    return _asked(panel, queries, instant=True, form=PromQueryFormat.TABLE)


def _told(panel: _P, title: str, description: str, limits: Sequence[Limit]) -> _P:
    alerts = [alert for each in limits for alert in each.alerts]
    watched = f" Watched by {', '.join(alerts)}." if alerts else ""
    return panel.title(title).description(description + watched).datasource(SOURCE)


def _steps(limits: Sequence[Limit]) -> dashboard.ThresholdsConfig:
    steps = [Threshold(None, "green"), *(Threshold(each.value, each.color) for each in limits)]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _asked(panel: _P, queries: Queries, *, instant: bool = False, form: PromQueryFormat | None = None) -> _P:
    for letter, (legend, expression) in zip(ascii_uppercase, queries.items(), strict=False):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(letter)
        query = query.instant() if instant else query.range()
        panel.with_target(query.format(form) if form else query)
    return panel
