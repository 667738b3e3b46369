"""`deploy/kubernetes` is valid by Kubernetes' schemas and agrees with the services' settings."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from common.serving.settings import ServiceSettings
from framesieve.v1 import encoder_pb2, generation_pb2, preprocessing_pb2
from services.encoder.settings import EncoderSettings
from services.generation.settings import GenerationSettings
from services.preprocessing.settings import PreprocessingSettings
from tests.deploy.kustomization import Manifest, build

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
OWN = "overlays/own"  # the example in its README
BUILDS = ("base", "overlays/gpu", OWN)
# The oldest version with all features (preStop sleep), and one of the newest with schemas.
VERSIONS = ("1.30", "1.34")
PODMONITOR = "monitoring.coreos.com/v1"  # a custom resource, not in Kubernetes' schemas

SETTINGS: Mapping[str, type[ServiceSettings]] = {
    "preprocessing": PreprocessingSettings,
    "encoder": EncoderSettings,
    "generation": GenerationSettings,
}
SERVED = {
    name: contract.DESCRIPTOR.services_by_name[f"{name.capitalize()}Service"].full_name
    for name, contract in (
        ("preprocessing", preprocessing_pb2),
        ("encoder", encoder_pb2),
        ("generation", generation_pb2),
    )
}
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


@pytest.fixture(params=BUILDS)
def manifests(request: pytest.FixtureRequest, deployed: Path) -> list[Manifest]:
    return build(deployed / request.param)


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def containers(manifests: list[Manifest]) -> Iterator[tuple[str, Any, Any]]:
    """For each deployment: its name, its pods' spec, and their only container."""
    deployments = of_kind(manifests, "Deployment")
    assert deployments.keys() == SETTINGS.keys()
    for name, deployment in deployments.items():
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        yield name, pod, container


def quantity(told: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(\w*)", told).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


def loaded(name: str, container: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The service's settings, loaded from the flags and variables of its container."""
    for each in container["env"]:
        field = each["name"].removeprefix("FRAMESIEVE_").lower()
        assert field in SETTINGS[name].model_fields, f"{name} has no setting {each['name']}"
        value = each.get("value")
        if value is None:
            limit = each["valueFrom"]["resourceFieldRef"]["resource"].removeprefix("limits.")
            value = str(math.ceil(quantity(container["resources"]["limits"][limit])))
        monkeypatch.setenv(each["name"], value)
    return SETTINGS[name].load(container["args"])


# --- what Kubernetes says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "version"), [(OWN, VERSIONS[0]), (OWN, VERSIONS[1]), ("overlays/gpu", VERSIONS[1])]
)  # both overlays include the base
def test_every_manifest_is_valid_by_its_schema(deployed: Path, folder: str, version: str) -> None:
    checked = [each for each in build(deployed / folder) if each["apiVersion"] != PODMONITOR]
    assert len(checked) >= 18
    for each in checked:
        assert kubernetes_validate.validate(each, version, strict=True) == version


def test_a_misspelt_field_is_not_valid(deployed: Path) -> None:
    deployment = of_kind(build(deployed / "base"), "Deployment")["encoder"]
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["readynessProbe"] = container.pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(deployment, VERSIONS[0], strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on this machine")
@pytest.mark.parametrize("folder", BUILDS)
def test_kubectl_builds_the_same(deployed: Path, folder: str) -> None:
    command = ["kubectl", "kustomize", str(deployed / folder)]
    built = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    theirs = list(yaml.safe_load_all(built.stdout))
    assert sorted(map(by_name, theirs)) == sorted(map(by_name, build(deployed / folder)))


def by_name(manifest: Manifest) -> str:
    """The manifest as text, with the entries of lists that go by name in the names' order."""

    def ordered(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: ordered(each) for key, each in value.items()}
        if isinstance(value, list):
            entries = [ordered(each) for each in value]
            return (
                sorted(entries, key=lambda each: each["name"]) if all("name" in each for each in entries) else entries
            )
        return value

    return json.dumps(ordered(manifest), sort_keys=True)


def test_the_namespace_enforces_the_restricted_pod_security_standard(manifests: list[Manifest]) -> None:
    (namespace,) = of_kind(manifests, "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert {each["metadata"].get("namespace") for each in manifests if each is not namespace} == {
        namespace["metadata"]["name"]
    }


# --- what selects what --------------------------------------------------------------------------------------------


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
    assert len(selectors) == 3 * 3 + 1 + 3 * 2
    for name, selector in selectors:
        assert [found for found, own in labels.items() if selector.items() <= own.items()] == [
            name.removesuffix("-headless")
        ]


def test_every_service_targets_a_port_of_its_pods(manifests: list[Manifest]) -> None:
    ports = {
        name: {each["name"]: each["containerPort"] for each in container["ports"]}
        for name, _, container in containers(manifests)
    }
    for service in of_kind(manifests, "Service").values():
        (port,) = service["spec"]["ports"]
        assert port["port"] == ports[service["spec"]["selector"]["app.kubernetes.io/name"]][port["targetPort"]]


def test_services_are_headless_and_generation_also_has_a_cluster_address(manifests: list[Manifest]) -> None:
    addresses = {name: service["spec"].get("clusterIP") for name, service in of_kind(manifests, "Service").items()}
    headless = dict.fromkeys(("preprocessing", "encoder", "generation-headless"), "None")
    assert addresses == {**headless, "generation": None}


def test_volumes_and_mounts_match(manifests: list[Manifest]) -> None:
    for _, pod, container in containers(manifests):
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert volumes.keys() == {each["name"] for each in container["volumeMounts"]}
        for each in volumes.values():
            if claim := each.get("persistentVolumeClaim"):
                assert claim["claimName"] in of_kind(manifests, "PersistentVolumeClaim")


# --- what the services say ----------------------------------------------------------------------------------------


def test_variables_are_settings_and_ports_are_the_services(
    manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    services = of_kind(manifests, "Service")
    for name, _, container in containers(manifests):
        settings = loaded(name, container, monkeypatch)
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert settings.listen == f"0.0.0.0:{ports['grpc']}"
        assert settings.metrics_port == ports["metrics"]
        for upstream in {"preprocessing", "encoder"} & settings.model_dump().keys():
            port = services[upstream]["spec"]["ports"][0]["port"]
            assert getattr(settings, upstream) == f"dns:///{upstream}:{port}"


def test_probes_use_the_port_and_name_of_the_service(manifests: list[Manifest]) -> None:
    for name, _, container in containers(manifests):
        (port,) = [each["containerPort"] for each in container["ports"] if each["name"] == "grpc"]
        assert container["startupProbe"]["grpc"] == container["livenessProbe"]["grpc"] == {"port": port}
        assert container["readinessProbe"]["grpc"] == {"port": port, "service": SERVED[name]}


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
            held += (settings.decode_workers + reading_workers) * settings.decode_memory_bytes + settings.inflight_bytes
        elif name == "encoder":
            held += 2 * settings.output_buffer_bytes + settings.cache_bytes
        else:
            held += settings.media_buffer_bytes
        assert quantity(container["resources"]["limits"]["memory"]) >= held + 2**30
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


def test_containers_have_the_images_and_restrictions_of_compose(manifests: list[Manifest]) -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for name, pod, container in containers(manifests):
        assert container["image"] == compose[name]["image"]
        assert (compose[name]["read_only"], compose[name]["cap_drop"]) == (True, ["ALL"])
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
        assert wanted == (None if name == "preprocessing" else "1")
        if wanted:
            assert loaded(name, container, monkeypatch).device == "cuda"
            assert [each["key"] for each in pod["tolerations"]] == ["nvidia.com/gpu"]
