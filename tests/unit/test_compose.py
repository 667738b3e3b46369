"""The compose file that guards every hop: what it sets is what the services know, and whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.probe import own_credentials
from services.encoder.settings import EncoderSettings
from services.generation.settings import GenerationSettings
from services.preprocessing.settings import PreprocessingSettings
from tests.certificates import Authority

ROOT = Path(__file__).parents[2]
SETTINGS = {"preprocessing": PreprocessingSettings, "encoder": EncoderSettings, "generation": GenerationSettings}
# Of whoever asks for its health.
OF_THE_PROBE = {"upstream_tls_ca"}


def guarded(service: str) -> dict[str, Any]:
    """What the file adds to a service that docker-compose.yml has."""
    plain, added = (
        yaml.safe_load((ROOT / name).read_text())["services"][service]
        for name in ("docker-compose.yml", "deploy/compose.guarded.yml")
    )
    assert added.keys() <= plain.keys()
    return dict(added)


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
    assert own_credentials(environment).for_channel("localhost:1") is not None


def test_its_secrets_belong_to_the_containers_user_before_the_containers_start() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    (given,) = re.findall(r"^sudo chown -R (\d+) (.*)$", text, re.MULTILINE)
    users = set(re.findall(r"useradd .*--uid (\d+)", (ROOT / "Dockerfile").read_text()))
    assert {given[0]} == users
    assert set(given[1].split()) == {f"secrets/{service}" for service in SETTINGS}
    assert text.index("sudo chown") < text.index("-f deploy/compose.guarded.yml up")
