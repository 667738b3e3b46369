"""The rules of `deploy/prometheus` and promtool's tests of them, parsed from their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1] / "deploy" / "prometheus"
TOPICS = ("availability", "latency", "saturation", "processes")  # in order of urgency


def _read(kind: str, topic: str) -> Any:
    return yaml.safe_load((FOLDER / kind / f"{topic}.yml").read_text())


RULES = [rule for topic in TOPICS for group in _read("rules", topic)["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDS = [rule for rule in RULES if "record" in rule]
TESTS = [test for topic in TOPICS for test in _read("tests", topic)["tests"]]
