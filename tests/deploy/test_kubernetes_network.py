"""The network policies of `deploy/kubernetes` allow the chain of services and nothing else, checked for all pairs."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml

from gridsieve.services.preprocessing.fetch import addresses
from tests.deploy.kustomization import Manifest, build

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
GRPC = {"preprocessing": 50051, "encoder": 50052, "generation": 50053}
METRICS = {"preprocessing": 9101, "encoder": 9102, "generation": 9103}
HTTP = {"gateway": 8000}
NAMED_PORTS: dict[str | int, dict[str, int]] = {"grpc": GRPC, "metrics": METRICS, "http": HTTP}


@dataclass(frozen=True)
class Place:
    """An endpoint of connections: a pod with labels in a namespace, or an external address."""

    labels: dict[str, str] = field(default_factory=dict)
    namespace: str = "gridsieve"
    callers: bool = False
    address: str | None = None

    @property
    def namespace_labels(self) -> dict[str, str]:
        allowed = {"gridsieve/callers": "allowed"} if self.callers else {}
        return {"kubernetes.io/metadata.name": self.namespace, **allowed}


def service(name: str) -> Place:
    return Place({"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "gridsieve"})


CALLER = {"gridsieve/caller": "true"}
PLACES = {
    **{name: service(name) for name in (*GRPC, *HTTP)},
    "caller": Place(CALLER, "app", callers=True),
    "unlabelled pod beside a caller": Place({}, "app", callers=True),
    "pod that calls itself a caller": Place(CALLER, "elsewhere"),
    "caller's label among the services": Place(CALLER),
    "stranger among the services": Place({"app.kubernetes.io/name": "shell"}),
    "prometheus": Place({"app.kubernetes.io/name": "prometheus"}, "monitoring"),
    "prometheus elsewhere": Place({"app.kubernetes.io/name": "prometheus"}, "elsewhere"),
    "dns": Place({"k8s-app": "kube-dns"}, "kube-system"),
    "public address": Place(namespace="", address="93.184.216.34"),
    "public address, IPv6": Place(namespace="", address="2606:2800:220:1::1"),
    "cloud's metadata": Place(namespace="", address="169.254.169.254"),
}
PORTS = sorted({*GRPC.values(), *METRICS.values(), *HTTP.values(), 22, 53, 80, 443})
CHAIN = {
    ("caller", "gateway", 8000),
    ("caller", "generation", 50053),
    ("gateway", "generation", 50053),
    ("gateway", "dns", 53),
    ("generation", "encoder", 50052),
    ("generation", "preprocessing", 50051),
    ("encoder", "preprocessing", 50051),
    ("generation", "dns", 53),
    ("encoder", "dns", 53),
    *(("prometheus", name, port) for name, port in (METRICS | HTTP).items()),
}


def edges(manifests: list[Manifest]) -> set[tuple[str, str, int]]:
    """The allowed connections (source, target, port) with at least one end in the services' namespace."""
    policies = [each["spec"] for each in manifests if each["kind"] == "NetworkPolicy"]
    return {
        (source, target, port)
        for source, sending in PLACES.items()
        for target, receiving in PLACES.items()
        for port in PORTS
        if source != target
        and "gridsieve" in (sending.namespace, receiving.namespace)
        and allowed(policies, "Egress", sending, receiving, port, target)
        and allowed(policies, "Ingress", receiving, sending, port, target)
    }


def allowed(policies: list[Any], direction: str, own: Place, peer: Place, port: int, target: str) -> bool:
    """Whether the policies that select `own` allow traffic with `peer`; without one, all traffic is allowed."""
    over = [
        each
        for each in policies
        if own.namespace == "gridsieve"
        and direction in each["policyTypes"]
        and matches(each["podSelector"], own.labels)
    ]
    rules = [rule for each in over for rule in each.get(direction.lower(), ())]
    return not over or any(
        any(is_peer(each, peer) for each in rule["to" if direction == "Egress" else "from"])
        and any(port in (each["port"], NAMED_PORTS.get(each["port"], {}).get(target)) for each in rule["ports"])
        for rule in rules
    )


def is_peer(told: Any, peer: Place) -> bool:
    if block := told.get("ipBlock"):
        if peer.address is None:
            return False
        address = ip_address(peer.address)
        return address in ip_network(block["cidr"]) and not any(address in ip_network(each) for each in block["except"])
    namespace = told.get("namespaceSelector")
    near = peer.namespace == "gridsieve" if namespace is None else matches(namespace, peer.namespace_labels)
    return peer.address is None and near and matches(told["podSelector"], peer.labels)


def matches(selector: Any, labels: dict[str, str]) -> bool:
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


@pytest.mark.parametrize("folder", ["base", "overlays/gpu"])
def test_only_the_chain_of_services_may_connect(folder: str) -> None:
    assert edges(build(FOLDER / folder)) == CHAIN


def test_the_urls_component_allows_preprocessing_alone_to_reach_the_internet(tmp_path: Path) -> None:
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(
        f"resources: [{FOLDER / 'base'}]\ncomponents: [{FOLDER / 'components' / 'urls'}]\nnamespace: gridsieve\n"
    )
    public = {
        ("preprocessing", address, port) for address in ("public address", "public address, IPv6") for port in (80, 443)
    }
    assert edges(build(overlay)) == {*CHAIN, *public, ("preprocessing", "dns", 53)}


def test_the_policy_and_the_service_agree_on_public_addresses() -> None:
    (policy,) = yaml.safe_load_all((FOLDER / "components" / "urls" / "network.yaml").read_text())
    told = {each["ipBlock"]["cidr"]: each["ipBlock"]["except"] for each in policy["spec"]["egress"][0]["to"]}
    assert told == {
        "0.0.0.0/0": [str(each) for each in addresses._SPECIAL_V4],
        str(addresses._ASSIGNED_V6): [str(each) for each in addresses._SPECIAL_V6],
    }
