"""A real Prometheus with the rules of `deploy/prometheus`, that scrapes services on this machine."""

from __future__ import annotations

import json
import math
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.process import free_port
from tests.rules import FOLDER

_READY_S = 30.0


class BadQueryError(Exception):
    """Prometheus cannot make anything of a query."""


@dataclass(frozen=True, slots=True)
class Prometheus:
    """Its HTTP API."""

    url: str

    def query(self, expression: str) -> list[Any]:
        """The series that an expression has now, without those that are NaN."""
        found = self._get("query", query=expression)["result"]
        return [each for each in found if not math.isnan(float(each["value"][1]))]

    def query_range(self, expression: str, last_s: float) -> list[Any]:
        """The series that it has had in the last seconds, as a panel asks, without those that were always NaN."""
        now = time.time()
        found = self._get("query_range", query=expression, start=now - last_s, end=now, step=1)["result"]
        return [each for each in found if not all(math.isnan(float(value)) for _, value in each["values"])]

    def rules(self) -> list[Any]:
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def label_values(self, label: str, selector: str) -> list[str]:
        values: list[str] = self._get(f"label/{label}/values", **{"match[]": selector})
        return values

    def _get(self, path: str, **parameters: Any) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                told = json.load(answer)
        except urllib.error.HTTPError as error:
            raise BadQueryError(f"{parameters}: {error.read().decode()}") from None
        assert told["status"] == "success", told
        assert not told.get("warnings"), told
        return told["data"]


@contextmanager
def scraping(program: str, folder: Path, ports: Mapping[str, Sequence[int]]) -> Iterator[Prometheus]:
    """`deploy/prometheus/prometheus.yml` itself, but for where the services' replicas are and for its pace."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(FOLDER / pattern) for pattern in config["rule_files"]]
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [f"127.0.0.1:{port}" for port in ports[job["job_name"]]]}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        program,
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_until_ready(process, address, folder / "log")
            yield Prometheus(f"http://{address}")
        finally:
            process.terminate()


def _wait_until_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://{address}/-/ready", timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"Prometheus is not ready: {log.read_text()[-2000:]}")
