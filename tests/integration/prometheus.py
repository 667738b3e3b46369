"""A real Prometheus with the rules of `deploy/prometheus` that scrapes services on this machine."""

from __future__ import annotations

import json
import math
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gridsieve.common.process import free_port
from tests.rules import FOLDER

_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Prometheus:
    """Its HTTP API."""

    url: str

    def query(self, expression: str) -> list[Any]:
        """The current series of an expression, without those that are NaN."""
        found = self.get("query", query=expression)["result"]
        return [each for each in found if not math.isnan(float(each["value"][1]))]

    def query_range(self, expression: str, last_s: float) -> list[Any]:
        """Its series over the last seconds, as a panel asks for them, without those that were always NaN."""
        now = time.time()
        found = self.get("query_range", query=expression, start=now - last_s, end=now, step=1)["result"]
        return [each for each in found if not all(math.isnan(float(value)) for _, value in each["values"])]

    def get(self, path: str, **parameters: Any) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            told = json.load(answer)
        assert told["status"] == "success", told
        assert not told.get("warnings"), told
        return told["data"]


def left(queries: Mapping[str, str], finds: Callable[[str], object]) -> dict[str, str]:
    """The queries that find nothing in time."""
    deadline, remaining = time.monotonic() + _WITHIN_S, dict(queries)
    while remaining and time.monotonic() < deadline:
        remaining = {name: expression for name, expression in remaining.items() if not finds(expression)}
        time.sleep(0.2 if remaining else 0)
    return remaining


@contextmanager
def scraping(program: str, folder: Path, ports: Mapping[str, Sequence[int]]) -> Iterator[Prometheus]:
    """Runs `deploy/prometheus/prometheus.yml` with other targets and shorter intervals."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(FOLDER / pattern) for pattern in config["rule_files"]]
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [f"127.0.0.1:{port}" for port in ports[job["job_name"]]]}]
    path, url = folder / "prometheus.yml", f"http://127.0.0.1:{free_port()}"
    path.write_text(yaml.safe_dump(config))
    flags = [f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}"]
    command = [program, *flags, f"--web.listen-address={url.removeprefix('http://')}"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:

        def ready(url: str) -> bool:
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            try:
                urllib.request.urlopen(url, timeout=1).close()
            except OSError:
                return False
            return True

        try:
            assert not left({"ready": f"{url}/-/ready"}, ready)
            yield Prometheus(url)
        finally:
            process.terminate()
