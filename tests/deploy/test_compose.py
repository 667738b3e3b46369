"""The compose files beside docker-compose.yml set settings that the services have, completely."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.serving.probe import own_credentials
from services.encoder.settings import EncoderSettings
from services.generation.settings import GenerationSettings
from services.preprocessing.settings import PreprocessingSettings
from tests.certificates import Authority

ROOT = Path(__file__).parents[2]
SETTINGS = {"preprocessing": PreprocessingSettings, "encoder": EncoderSettings, "generation": GenerationSettings}
# A setting of the health check, not of the service.
OF_THE_PROBE = {"upstream_tls_ca"}


def added_by(name: str) -> dict[str, dict[str, Any]]:
    """What the file adds to the services of docker-compose.yml."""
    plain, added = (yaml.safe_load((ROOT / each).read_text())["services"] for each in ("docker-compose.yml", name))
    assert added.keys() <= plain.keys()
    return dict(added)


def guarded(service: str) -> dict[str, Any]:
    plain = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"][service]
    added = added_by("deploy/compose.guarded.yml")[service]
    assert added.keys() <= plain.keys()
    return added


@pytest.mark.parametrize("service", SETTINGS)
def test_guarded_services_require_certificates_and_tokens_and_call_with_their_own(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in guarded(service)["environment"].items():
        monkeypatch.setenv(name, str(value))
        known = set(SETTINGS[service].model_fields) | OF_THE_PROBE
        assert name.removeprefix("FRAMESIEVE_").lower() in known, f"{service} has no setting for {name}"
    settings = SETTINGS[service].load([])
    assert settings.tls_client_ca == Path("/secrets/ca.pem")
    assert settings.auth_tokens_file == Path("/secrets/tokens")
    if service != "preprocessing":
        assert (settings.upstream_tls_ca, settings.upstream_token_file) == (
            Path("/secrets/ca.pem"),
            Path("/secrets/token"),
        )


@pytest.mark.parametrize("service", SETTINGS)
def test_guarded_health_checks_use_the_name_in_the_certificate(service: str, tmp_path: Path) -> None:
    told = guarded(service)
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
    users = set(re.findall(r"useradd .*--uid (\d+)", (ROOT / "Dockerfile").read_text()))
    assert {given[0]} == users
    assert set(given[1].split()) == {f"secrets/{service}" for service in SETTINGS}
    assert text.index("sudo chown") < text.index("-f deploy/compose.guarded.yml up")


def test_the_gpu_file_gives_the_encoder_and_generation_one_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    added = added_by("deploy/compose.gpu.yml")
    assert set(added) == {"encoder", "generation"}
    for service, told in added.items():
        assert set(told) == {"environment", "deploy", "healthcheck"}
        assert told["healthcheck"] == {"start_period": "600s"}
        assert told["deploy"]["resources"]["reservations"]["devices"] == [
            {
                "driver": "nvidia",
                "device_ids": [f"${{FRAMESIEVE_{service.upper()}_GPU:-0}}"],
                "capabilities": ["gpu"],
            }
        ]
        for name, value in told["environment"].items():
            monkeypatch.setenv(name, value)
        settings = SETTINGS[service].load([])
        assert isinstance(settings, (EncoderSettings, GenerationSettings))
        assert settings.device == "cuda"


def test_without_the_gpu_file_no_service_needs_a_gpu() -> None:
    plain = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for service in SETTINGS:
        assert "deploy" not in plain[service]
        assert "FRAMESIEVE_DEVICE" not in plain[service]["environment"]


def test_the_docs_name_the_files() -> None:
    for document, name in (("docs/gpus.md", "gpu"), ("README.md", "gpu"), ("docs/security.md", "guarded")):
        assert f"docker compose -f docker-compose.yml -f deploy/compose.{name}.yml up" in (ROOT / document).read_text()
