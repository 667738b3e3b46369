"""The settings of the gateway."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from common.serving.settings import CallerSettings


class GatewaySettings(CallerSettings):
    """Flags and FRAMESIEVE_ variables of `python -m services.gateway`."""

    model_config = SettingsConfigDict(cli_prog_name="python -m services.gateway")

    listen: str = Field("127.0.0.1:8000", description="address to serve HTTP on, host:port or unix:/path")
    generation: str = Field(
        "127.0.0.1:50053",
        description="address of generation: host:port (all addresses that the name resolves to), unix:/path, or "
        "several ip:port separated by commas",
    )
    cors_origins: str = Field(
        "", description="origins whose pages may call the gateway, separated by commas, or *; unset: only its own page"
    )
