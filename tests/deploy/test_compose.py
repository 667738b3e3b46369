"""The compose files beside docker-compose.yml set settings that the services have, completely."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gridsieve.common.serving.probe import own_credentials
from gridsieve.services.gateway.settings import GatewaySettings
from tests.certificates import Authority
from tests.deploy.services import DEPLOYED, ROOT, SETTINGS, compose

GUARDED, GPU = "deploy/compose.guarded.yml", "deploy/compose.gpu.yml"
# A setting of the health check, not of the service.
OF_THE_PROBE = {"upstream_tls_ca"}


def test_the_other_files_only_change_services_of_the_first() -> None:
    assert compose(GUARDED).keys() <= compose().keys()
    assert compose(GPU).keys() == {"encoder", "generation"}
    assert not any("deploy" in compose()[service] for service in SETTINGS)  # it needs no GPU


@pytest.mark.parametrize("service", SETTINGS)
def test_guarded_services_require_certificates_and_tokens_and_call_with_their_own(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in compose(GUARDED)[service]["environment"].items():
        monkeypatch.setenv(name, str(value))
        known = set(SETTINGS[service].model_fields) | OF_THE_PROBE
        assert name.removeprefix("GRIDSIEVE_").lower() in known, f"{service} has no setting for {name}"
    settings: Any = SETTINGS[service].load([])
    folder = Path("/secrets")
    assert (settings.tls_client_ca, settings.auth_tokens_file) == (folder / "ca.pem", folder / "tokens")
    if service != "preprocessing":
        assert (settings.upstream_tls_ca, settings.upstream_token_file) == (folder / "ca.pem", folder / "token")


@pytest.mark.parametrize("file", ["docker-compose.yml", GUARDED])
def test_the_gateway_has_settings_for_all_its_variables(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in compose(file)["gateway"]["environment"].items():
        if not name.startswith("OTEL_"):
            assert name.removeprefix("GRIDSIEVE_").lower() in GatewaySettings.model_fields
            monkeypatch.setenv(name, value)
    settings = GatewaySettings.load([])
    assert (settings.tls_cert is None) == (file != GUARDED)
    assert compose()["gateway"]["ports"] == ["127.0.0.1:8000:8000"]


def test_the_gateway_writes_uploads_where_preprocessing_reads_them() -> None:
    for service, mode in (("gateway", ""), ("preprocessing", ":ro")):
        root = compose()[service]["environment"]["GRIDSIEVE_UPLOAD_ROOT"]
        assert f"uploads:{root}{mode}" in compose()[service]["volumes"]
        # A new volume has the owner of the image's folder.
        target = (ROOT / "Dockerfile").read_text().partition(f" AS {service}\n")[2].partition("\nFROM ")[0]
        assert f"install --directory --owner=gridsieve --mode=700 {root}\n" in target


@pytest.mark.parametrize("service", ["preprocessing", "gateway"])
def test_an_image_has_every_package_that_its_service_imports(service: str) -> None:
    """Of those without torch, which take long to import."""
    program = f"import sys, gridsieve.services.{service}.__main__; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout
    imported = set(re.findall(r"gridsieve\.(?:services\.)?\w+(?=\.)", modules))
    target = (ROOT / "Dockerfile").read_text().partition(f" AS {service}\n")[2].partition("\nFROM ")[0]
    copied = set(re.findall(r"COPY (gridsieve/\S+) \$PACKAGE", target))
    assert {name.replace(".", "/") for name in imported} - copied <= {"gridsieve/services", "gridsieve/v1"}


@pytest.mark.parametrize("service", SETTINGS)
def test_guarded_health_checks_use_the_name_in_the_certificate(service: str, tmp_path: Path) -> None:
    told = compose(GUARDED)[service]
    assert told["healthcheck"]["test"][-1] == f"localhost:{SETTINGS[service].model_fields['listen'].default[-5:]}"
    assert told["volumes"] == [f"./secrets/{service}:/secrets:ro"]
    authority = Authority(tmp_path)
    issued = authority.issue("localhost")
    files = {"ca.pem": authority.path, "cert.pem": issued.cert, "key.pem": issued.key}
    environment = {name: str(files.get(Path(str(value)).name, value)) for name, value in told["environment"].items()}
    assert own_credentials("localhost:1", environment).for_channel("localhost:1") is not None


def test_the_docs_give_the_secrets_to_the_containers_user_before_the_start() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    (given,) = re.findall(r"^sudo chown -R (\d+) (.*)$", text, re.MULTILINE)
    assert {given[0]} == set(re.findall(r"useradd .*--uid (\d+)", (ROOT / "Dockerfile").read_text()))
    assert set(given[1].split()) == {f"secrets/{service}" for service in DEPLOYED}
    assert text.index("sudo chown") < text.index(f"-f {GUARDED} up")


@pytest.mark.parametrize("service", ["encoder", "generation"])
def test_the_gpu_file_gives_the_encoder_and_generation_one_gpu_each(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = compose(GPU)[service]
    (device,) = told["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == [f"${{GRIDSIEVE_{service.upper()}_GPU:-0}}"]
    for name, value in told["environment"].items():
        monkeypatch.setenv(name, value)
    settings: Any = SETTINGS[service].load([])
    assert settings.device == "cuda"


@pytest.mark.parametrize(("service", "port"), [("prometheus", 9090), ("grafana", 3000)])
def test_monitoring_listens_on_loopback_and_is_read_only(service: str, port: int) -> None:
    told = compose()[service]
    assert told["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert (told["read_only"], told["cap_drop"]) == (True, ["ALL"])
