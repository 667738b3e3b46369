"""The compose files beside docker-compose.yml: what they set is what the services know, and whole."""

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
# Of whoever asks for its health.
OF_THE_PROBE = {"upstream_tls_ca"}


def added_by(name: str) -> dict[str, dict[str, Any]]:
    """What the file adds to services that docker-compose.yml has."""
    plain, added = (yaml.safe_load((ROOT / each).read_text())["services"] for each in ("docker-compose.yml", name))
    assert added.keys() <= plain.keys()
    return dict(added)


def guarded(service: str) -> dict[str, Any]:
    plain = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"][service]
    added = added_by("deploy/compose.guarded.yml")[service]
    assert added.keys() <= plain.keys()
    return added


@pytest.mark.parametrize("service", SETTINGS)
def test_each_service_in_containers_asks_for_a_certificate_and_a_token_and_calls_with_its_own(
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
def test_its_healthcheck_asks_by_the_name_in_its_certificate(service: str, tmp_path: Path) -> None:
    told = guarded(service)
    assert told["healthcheck"]["test"][-1] == f"localhost:{SETTINGS[service].model_fields['listen'].default[-5:]}"
    assert told["volumes"] == [f"./secrets/{service}:/secrets:ro"]
    authority = Authority(tmp_path)
    issued = authority.issue("localhost")
    files = {"ca.pem": authority.path, "cert.pem": issued.cert, "key.pem": issued.key}
    environment = {name: str(files.get(Path(str(value)).name, value)) for name, value in told["environment"].items()}
    assert own_credentials("localhost:1", environment).for_channel("localhost:1") is not None


def test_its_secrets_belong_to_the_containers_user_before_the_containers_start() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    (given,) = re.findall(r"^sudo chown -R (\d+) (.*)$", text, re.MULTILINE)
    users = set(re.findall(r"useradd .*--uid (\d+)", (ROOT / "Dockerfile").read_text()))
    assert {given[0]} == users
    assert set(given[1].split()) == {f"secrets/{service}" for service in SETTINGS}
    assert text.index("sudo chown") < text.index("-f deploy/compose.guarded.yml up")


def test_the_encoder_and_generation_have_a_gpu_each_and_time_to_start_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_without_that_file_nothing_asks_for_a_gpu() -> None:
    plain = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for service in SETTINGS:
        assert "deploy" not in plain[service]
        assert "FRAMESIEVE_DEVICE" not in plain[service]["environment"]


def test_the_documents_name_the_files_as_they_are() -> None:
    for document, name in (("docs/gpus.md", "gpu"), ("README.md", "gpu"), ("docs/security.md", "guarded")):
        assert f"docker compose -f docker-compose.yml -f deploy/compose.{name}.yml up" in (ROOT / document).read_text()
