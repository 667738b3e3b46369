"""Preprocessing's settings."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from common.settings import ServiceSettings


class PreprocessingSettings(ServiceSettings):
    """Flags and FRAMESIEVE_… variables of `python -m services.preprocessing`."""

    model_config = SettingsConfigDict(cli_prog_name="python -m services.preprocessing")

    listen: str = Field("127.0.0.1:50051", description="address to serve on, host:port or unix:/path")
    metrics_port: int = Field(9101, ge=0, le=65535, description="port for Prometheus' /metrics; 0 serves none")
    media_root: Path | None = Field(None, description="folder below which paths may be opened; without it none may")
