"""A real Prometheus scrapes real services: every rule, dashboard and autoscaler of `deploy` finds its data."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana import dashboard
from gridsieve import sync
from gridsieve.bench.metrics import read_metrics
from gridsieve.cli.launcher import SERVICES
from gridsieve.client.client import GridsieveClient
from gridsieve.client.live_events import LiveSlice
from gridsieve.client.prompt import Image, Video
from gridsieve.common.contract import errors
from tests import media
from tests.deploy.kustomization import build
from tests.integration.fleet import Service, Stack
from tests.integration.gateway import Gateway
from tests.integration.prometheus import Prometheus, left, scraping
from tests.rules import ALERTS, RECORDS, RULES

BOARD = json.loads(dashboard.PATH.read_text())
PANELS = BOARD["panels"]
KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"


class Camera(BaseHTTPRequestHandler):
    """Films without an end."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):  # nobody watches any more
            while True:
                self.wfile.write(media.stream("mpegts"))
                time.sleep(0.5)

    def log_request(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def live(live_stack: Stack, fetch_port: int) -> Iterator[Service]:
    """A second generation service, of which a live session watches a camera."""
    server = ThreadingHTTPServer(("127.0.0.1", fetch_port), Camera)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever).start()
    try:
        with (
            sync.GridsieveClient(live_stack.address) as client,
            client.live(source=f"http://localhost:{fetch_port}/", source_name="door", answer_tokens=128) as session,
        ):
            next(each for each in session.events() if isinstance(each, LiveSlice))
            yield live_stack.services["generation"]
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def watching(
    prometheus: str,
    stack: Stack,
    door: Gateway,
    live: Service,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Prometheus]:
    """A Prometheus that has scraped the services while they answered requests of every kind."""
    ports = {service: [port] for service, port in stack.metrics_ports.items()}
    ports["generation"].append(live.metrics_port)
    folder = tmp_path_factory.mktemp("prometheus")
    with scraping(prometheus, folder, {**ports, "gateway": [door.port]}) as scraped:
        assert not left({"scraped": "up == 1"}, lambda expression: len(scraped.query(expression)) == len(SERVICES) + 2)
        asyncio.run(ask_everything(stack.address))
        yield scraped


async def ask_everything(address: str) -> None:
    clip = Video(data=media.clip(seed=951))  # unknown to the caches
    by_evs: Any = {"pruning_method": "evs"}
    async with GridsieveClient(address) as client:
        await asyncio.gather(
            client.ask(clip, "What moves?", max_new_tokens=24, pruning_rate=0.5, **by_evs),
            client.ask(Image(data=media.picture(112, 84)), "What is this?", max_new_tokens=24),
            client.ask(None, "Hello?", max_new_tokens=24),
        )
        await client.ask(clip, "What moves?", max_new_tokens=4, pruning_rate=0.75, **by_evs)  # cached embeddings
        await client.ask(clip, "Where to?", max_new_tokens=4, pruning_rate=0.75, **by_evs)  # a prefix cache hit
        with pytest.raises(errors.MediaRejected):
            await client.ask(Video(data=b"no film"), "What moves?")


def filled_in(expression: str) -> str:
    """With the variables of Grafana, and a window that contains the whole test."""
    return expression.replace("$__rate_interval", "2m").replace("$instance", ".*")


def test_every_panel_of_the_dashboard_has_data(watching: Prometheus) -> None:
    asked: dict[bool, dict[str, str]] = {True: {}, False: {}}
    for panel in PANELS:
        for target in panel.get("targets", ()):
            asked[target["instant"]][f"{panel['id']} {panel['title']} {target['refId']}"] = filled_in(target["expr"])
    assert all(asked.values())
    assert not left(asked[True], watching.query)
    assert not left(asked[False], lambda expression: watching.query_range(expression, 30))


def test_the_stages_stack_up_to_the_mean_time_to_first_token(watching: Prometheus) -> None:
    """Compares totals, since `rate` extrapolates beyond the first sample."""
    (panel,) = (each for each in PANELS if each["title"] == "Time to first token by stage")
    height = " + ".join(f"({filled_in(target['expr'])})" for target in panel["targets"])
    totals, replaced = re.subn(r"\brate\((\w+(?:{[^}]*})?)\[2m\]\)", r"\1", height)
    assert replaced == 2 * len(panel["targets"])
    first_token = "gridsieve_generation_time_to_first_token_seconds"
    ratio = f"({totals}) / (sum({first_token}_sum) / sum({first_token}_count))"
    assert not left({"ratio": ratio}, watching.query)
    assert float(watching.query(ratio)[0]["value"][1]) == pytest.approx(1, abs=1e-3)


def test_every_rule_has_data_and_none_fails_or_fires(watching: Prometheus) -> None:
    def uncompared(expression: str) -> str:
        """An alert without its comparison, and without that to yesterday."""
        return re.sub(r"([<>]=?|[!=]=) [\d.]+", "", expression.replace(" offset 1d", ""))

    def recorded_by(rule: Any) -> str:
        """A selector of the series that a recording rule makes; several rules may share a name."""
        matchers = [f'{label}="{value}"' for label, value in rule.get("labels", {}).items()]
        return f"{rule['record']}{{{', '.join(matchers)}}}"

    compared = {name: uncompared(rule["expr"]) for name, rule in ALERTS.items()}
    recorded = {series: series for series in map(recorded_by, RECORDS)}
    assert not left(compared | recorded, watching.query)
    rules = [rule for group in watching.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(RULES)
    assert [rule for rule in rules if rule["health"] != "ok" or rule.get("lastError")] == []
    assert watching.query('ALERTS{alertstate="firing"}') == []


# --- autoscalers, which read metrics by the rules of prometheus-adapter ---------------------------------------------


@pytest.fixture(scope="module")
def scalers() -> list[Any]:
    """The specs of the autoscalers."""
    return [each["spec"] for each in build(KUBERNETES / "base") if each["kind"] == "HorizontalPodAutoscaler"]


@pytest.fixture(scope="module")
def rules() -> list[Any]:
    return yaml.safe_load((KUBERNETES / "components" / "monitoring" / "adapter.yaml").read_text())["rules"]["custom"]


def served_by(rules: list[Any], name: str) -> Any:
    """The one rule of the adapter that serves a metric of this name."""

    def serves(rule: Any) -> bool:
        pattern = re.search(r'__name__=~"([^"]+)"', rule["seriesQuery"])
        return bool(re.fullmatch(pattern[1], name)) if pattern else bool(rule["name"]["as"] == name)

    (rule,) = filter(serves, rules)
    return rule


def test_each_autoscaler_scales_its_deployment(scalers: list[Any]) -> None:
    deployments = [each for each in build(KUBERNETES / "base") if each["kind"] == "Deployment"]
    assert not [each for each in deployments if "replicas" in each["spec"]]
    targets = sorted(spec["scaleTargetRef"]["name"] for spec in scalers)
    assert targets == sorted(each["metadata"]["name"] for each in deployments)
    assert all(2 <= spec["minReplicas"] < spec["maxReplicas"] for spec in scalers)  # one serves while one is replaced


async def test_every_series_of_an_autoscaler_is_served_by_a_rule_and_exported_by_a_service(
    scalers: list[Any], rules: list[Any], stack: Stack
) -> None:
    samples: dict[str, set[tuple[str, str]]] = {}
    for each in await read_metrics([f"127.0.0.1:{port}" for port in stack.metrics_ports.values()]):
        for name, labels in each:
            samples.setdefault(name, set()).update(labels)
    metrics = [each["pods"]["metric"] for spec in scalers for each in spec["metrics"] if each["type"] == "Pods"]
    assert len(metrics) == 5
    for metric in metrics:
        rule = served_by(rules, metric["name"])
        assert 'namespace!="",pod!=""' in rule["seriesQuery"]
        queries = f"{rule['seriesQuery']} {rule['metricsQuery']}"
        queried = re.findall(r"gridsieve_\w+", queries) if "name" in rule else [metric["name"]]
        assert [name for name in queried if name not in samples] == []
        assert metric.get("selector", {}).get("matchLabels", {}).items() <= samples[queried[0]]
        assert set(re.findall(r'(stage)="(\w+)"', queries)) <= samples[queried[0]]
