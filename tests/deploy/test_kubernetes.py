"""`deploy/kubernetes` is valid by Kubernetes' schemas and agrees with the services' settings."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gridsieve.v1 import encoder_pb2, generation_pb2, preprocessing_pb2
from tests.deploy.kustomization import Manifest, build
from tests.deploy.services import DEPLOYED, ROOT, compose

FOLDER = ROOT / "deploy" / "kubernetes"
OWN = "overlays/own"  # the example in its README
BUILDS = ("base", "overlays/gpu", OWN)
PODMONITOR = "monitoring.coreos.com/v1"  # a custom resource, not in Kubernetes' schemas
CONTRACTS = {"preprocessing": preprocessing_pb2, "encoder": encoder_pb2, "generation": generation_pb2}
UNITS = {"": 1, "m": 1e-3, "Mi": 2**20, "Gi": 2**30}


@pytest.fixture(scope="session")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder, with the example overlay of its README."""
    folder = tmp_path_factory.mktemp("deployed") / "kubernetes"
    shutil.copytree(FOLDER, folder)
    (example,) = re.findall(r"```yaml\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    (folder / OWN).mkdir()
    (folder / OWN / "kustomization.yaml").write_text(example)
    return folder


@pytest.fixture(scope="module", params=BUILDS)
def manifests(request: pytest.FixtureRequest, deployed: Path) -> list[Manifest]:
    return build(deployed / request.param)


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def containers(manifests: list[Manifest]) -> Iterator[tuple[str, Any, Any]]:
    """For each deployment: its name, its pods' spec, and their only container."""
    deployments = of_kind(manifests, "Deployment")
    assert deployments.keys() == DEPLOYED.keys()
    for name, deployment in deployments.items():
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        yield name, pod, container


def ports_of(container: Any) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container["ports"]}


def quantity(told: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(\w*)", told).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


def loaded(name: str, container: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The service's settings, loaded from the flags and variables of its container."""
    for each in container["env"]:
        field = each["name"].removeprefix("GRIDSIEVE_").lower()
        assert field in DEPLOYED[name].model_fields, f"{name} has no setting {each['name']}"
        value = each.get("value")
        if value is None:
            limit = each["valueFrom"]["resourceFieldRef"]["resource"].removeprefix("limits.")
            value = str(math.ceil(quantity(container["resources"]["limits"][limit])))
        monkeypatch.setenv(each["name"], value)
    return DEPLOYED[name].load(container["args"])


# Both overlays include the base. 1.30 is the oldest version with all features (preStop sleep).
@pytest.mark.parametrize(("folder", "version"), [(OWN, "1.30"), ("overlays/gpu", "1.34")])
def test_every_manifest_is_valid_by_its_schema(deployed: Path, folder: str, version: str) -> None:
    checked = [each for each in build(deployed / folder) if each["apiVersion"] != PODMONITOR]
    assert len(checked) >= 18
    for each in checked:
        assert kubernetes_validate.validate(each, version, strict=True) == version


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on this machine")
@pytest.mark.parametrize("folder", [OWN, "overlays/gpu"])
def test_kubectl_builds_the_same(deployed: Path, folder: str) -> None:
    command = ["kubectl", "kustomize", str(deployed / folder)]
    built = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert in_order(build(deployed / folder)) == in_order(list(yaml.safe_load_all(built.stdout)))


def in_order(value: Any) -> Any:
    """With all keys and all lists sorted."""
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value)}
    return sorted(map(in_order, value), key=str) if isinstance(value, list) else value


def test_the_namespace_enforces_the_restricted_pod_security_standard(manifests: list[Manifest]) -> None:
    (namespace,) = of_kind(manifests, "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    others = {each["metadata"].get("namespace") for each in manifests if each is not namespace}
    assert others == {namespace["metadata"]["name"]}


def test_every_selector_matches_the_pods_of_its_name(manifests: list[Manifest]) -> None:
    labels = {
        name: each["spec"]["template"]["metadata"]["labels"] for name, each in of_kind(manifests, "Deployment").items()
    }
    selectors = [
        (name, each["spec"]["selector"].get("matchLabels", each["spec"]["selector"]))
        for kind in ("Deployment", "Service", "PodDisruptionBudget")
        for name, each in of_kind(manifests, kind).items()
    ]
    selectors += [
        (name, spread["labelSelector"]["matchLabels"])
        for name, pod, _ in containers(manifests)
        for spread in pod["topologySpreadConstraints"]
    ]
    for name, selector in selectors:
        matched = [found for found, own in labels.items() if selector.items() <= own.items()]
        assert matched == [name.removesuffix("-headless")]


def test_services_are_headless_target_their_pods_and_what_callers_use_has_a_cluster_address(
    manifests: list[Manifest],
) -> None:
    ports = {name: ports_of(container) for name, _, container in containers(manifests)}
    addresses = {}
    for name, service in of_kind(manifests, "Service").items():
        (port,) = service["spec"]["ports"]
        assert port["port"] == ports[service["spec"]["selector"]["app.kubernetes.io/name"]][port["targetPort"]]
        addresses[name] = service["spec"].get("clusterIP")
    headless = dict.fromkeys(("preprocessing", "encoder", "generation-headless"), "None")
    assert addresses == {**headless, "generation": None, "gateway": None}


def test_variables_are_settings_and_ports_are_the_services(
    manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    services = of_kind(manifests, "Service")
    for name, _, container in containers(manifests):
        settings, ports = loaded(name, container, monkeypatch), ports_of(container)
        if name == "gateway":
            assert settings.listen == f"0.0.0.0:{ports['http']}"
            assert settings.generation == f"dns:///generation-headless:{ports_of_generation(manifests)}"
            continue
        assert settings.listen == f"0.0.0.0:{ports['grpc']}"
        assert settings.metrics_port == ports["metrics"]
        for upstream in {"preprocessing", "encoder"} & settings.model_dump().keys():
            port = services[upstream]["spec"]["ports"][0]["port"]
            assert getattr(settings, upstream) == f"dns:///{upstream}:{port}"


def ports_of_generation(manifests: list[Manifest]) -> int:
    return next(ports_of(container)["grpc"] for name, _, container in containers(manifests) if name == "generation")


def test_probes_use_the_port_and_name_of_the_service(manifests: list[Manifest]) -> None:
    for name, _, container in containers(manifests):
        if name == "gateway":
            assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
            continue
        port = ports_of(container)["grpc"]
        served = CONTRACTS[name].DESCRIPTOR.services_by_name[f"{name.capitalize()}Service"].full_name
        assert container["startupProbe"]["grpc"] == container["livenessProbe"]["grpc"] == {"port": port}
        assert container["readinessProbe"]["grpc"] == {"port": port, "service": served}


def test_the_grace_period_covers_leaving_and_draining(
    manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, pod, container in containers(manifests):
        leaving_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        drain_s = loaded(name, container, monkeypatch).drain_s
        assert pod["terminationGracePeriodSeconds"] >= leaving_s + drain_s + 5


def test_memory_limits_cover_what_the_settings_allow(
    manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, pod, container in containers(manifests):
        settings = loaded(name, container, monkeypatch)
        (tmp,) = [each["emptyDir"] for each in pod["volumes"] if each["name"] == "tmp"]
        assert tmp["medium"] == "Memory"
        held = quantity(tmp["sizeLimit"])
        if name == "preprocessing":
            assert held > (settings.fetch_disk_bytes if settings.fetch_schemes else 0)
            reading_workers = 2
            workers = settings.decode_workers + reading_workers + settings.max_streams
            held += workers * settings.decode_memory_bytes + settings.inflight_bytes
        elif name == "encoder":
            held += 2 * settings.output_buffer_bytes + settings.cache_bytes
        elif name == "generation":
            held += settings.media_buffer_bytes
        else:
            held += 4 * 3 * settings.max_inline_bytes
        assert quantity(container["resources"]["limits"]["memory"]) >= held + 2**30
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


def test_containers_have_the_images_and_restrictions_of_compose(manifests: list[Manifest]) -> None:
    for name, pod, container in containers(manifests):
        there = compose()[name]
        assert container["image"] == there["image"]
        assert (there["read_only"], there["cap_drop"]) == (True, ["ALL"])
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert f"--uid {pod['securityContext']['runAsUser']} " in (ROOT / "Dockerfile").read_text()
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        # No token for the API server, and no variables of other services: they would look like settings.
        assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)


def test_the_encoder_and_generation_request_and_use_a_gpu(deployed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, pod, container in containers(build(deployed / "overlays/gpu")):
        wanted = container["resources"]["limits"].get("nvidia.com/gpu")
        assert wanted == (None if name in ("preprocessing", "gateway") else "1")
        if wanted:
            assert loaded(name, container, monkeypatch).device == "cuda"
            assert [each["key"] for each in pod["tolerations"]] == ["nvidia.com/gpu"]
