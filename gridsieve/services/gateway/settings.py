"""The settings of the gateway."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from gridsieve.common.serving.settings import CallerSettings


class GatewaySettings(CallerSettings):
    """Flags and GRIDSIEVE_ variables of `python -m gridsieve.services.gateway`."""

    model_config = SettingsConfigDict(cli_prog_name="python -m gridsieve.services.gateway")

    listen: str = Field("127.0.0.1:8000", description="address to serve HTTP on, host:port or unix:/path")
    generation: str = Field(
        "127.0.0.1:50053",
        description="address of generation: host:port (all addresses that the name resolves to), unix:/path, or "
        "several ip:port separated by commas",
    )
    encoder: str | None = Field(
        None, description="address of the encoder, for the page to draw what was kept; unset: it does not"
    )
    cors_origins: str = Field(
        "",
        description="origins whose pages may call the gateway, and by whose hosts, separated by commas, or *; unset: "
        "only its own page",
    )
    upload_root: Path | None = Field(
        None,
        description="folder for uploaded files (POST /v1/files), the same as preprocessing's --upload-root; unset: no "
        "uploads",
    )
    upload_max_bytes: int = Field(2**30, ge=1, description="maximum bytes of one uploaded file")
    upload_disk_bytes: int = Field(2**34, ge=1, description="maximum bytes of all uploaded files")
    upload_expires_s: float = Field(86_400.0, gt=0, description="seconds after its upload that a file is deleted")
    moments: Path | None = Field(
        None,
        description="folder of films, below preprocessing's --media-root, whose moments the page finds: `gridsieve "
        "index` made its index; unset: none",
    )
    moments_embedder: str = Field(
        "127.0.0.1:50063", description="address of generation, host:port, whose model made the index of --moments"
    )
    moments_store: str | None = Field(
        None, description="URL of the Postgres with the index of --moments; unset: the file in the folder"
    )
