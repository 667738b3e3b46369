"""The services' settings, and what docker-compose.yml and its variants say about them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gridsieve.common.serving.settings import ListenerSettings, ServiceSettings
from gridsieve.services.encoder.settings import EncoderSettings
from gridsieve.services.gateway.settings import GatewaySettings
from gridsieve.services.generation.settings import GenerationSettings
from gridsieve.services.preprocessing.settings import PreprocessingSettings

ROOT = Path(__file__).parents[2]
SETTINGS: Mapping[str, type[ServiceSettings]] = {
    "preprocessing": PreprocessingSettings,
    "encoder": EncoderSettings,
    "generation": GenerationSettings,
}
DEPLOYED: Mapping[str, type[ListenerSettings]] = {**SETTINGS, "gateway": GatewaySettings}


@cache
def compose(name: str = "docker-compose.yml") -> dict[str, Any]:
    """The services of a compose file."""
    return dict(yaml.safe_load((ROOT / name).read_text())["services"])
