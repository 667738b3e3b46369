"""Preprocessing's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PlainValidator, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from common.errors import StartupError
from common.settings import ServiceSettings
from services.preprocessing.fetch.policy import AllowedDomain, FetchPolicy

Domain = Annotated[AllowedDomain, PlainValidator(AllowedDomain.parse)]


class PreprocessingSettings(ServiceSettings):
    """Flags and FRAMESIEVE_… variables of `python -m services.preprocessing`. Lists are parted by commas."""

    model_config = SettingsConfigDict(cli_prog_name="python -m services.preprocessing")

    listen: str = Field("127.0.0.1:50051", description="address to serve on, host:port or unix:/path")
    metrics_port: int = Field(9101, ge=0, le=65535, description="port for Prometheus' /metrics; 0 serves none")
    media_root: Path | None = Field(None, description="folder below which paths may be opened; without it none may")
    allow_media_domain: Annotated[tuple[Domain, ...], NoDecode] = Field(
        (),
        description="hosts that URLs may name, at public addresses, or also in a network given after =: "
        "cdn.example.org,*.example.com,minio=10.20.0.0/16; without it, every host at public addresses",
    )
    fetch_schemes: Annotated[tuple[Literal["http", "https"], ...], NoDecode] = Field(
        ("http", "https"), description="what URLs may start with: http,https or one of them; '' fetches nothing"
    )
    fetch_ports: Annotated[tuple[Annotated[int, Field(ge=1, le=65535)], ...], NoDecode] = Field(
        (80, 443), description="ports that URLs may name: 80,443,9000"
    )
    fetch_max_bytes: int = Field(2**30, ge=1, description="most bytes that one URL may bring")
    fetch_disk_bytes: int = Field(
        2**32,
        ge=1,
        description="most bytes that fetched media may take together, in TMPDIR; above, they are refused",
    )
    fetch_timeout_s: float = Field(60.0, gt=0, description="most seconds that a URL may take, from name to last byte")

    @field_validator("allow_media_domain", "fetch_schemes", "fetch_ports", mode="before")
    @classmethod
    def _parted(cls, value: object) -> object:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_fits_the_disk(self) -> Self:
        if self.fetch_max_bytes > self.fetch_disk_bytes:
            raise StartupError(
                f"--fetch-max-bytes {self.fetch_max_bytes} must be at most --fetch-disk-bytes {self.fetch_disk_bytes}"
            )
        return self

    @property
    def fetch_policy(self) -> FetchPolicy:
        """What may be fetched, and how much of it."""
        return FetchPolicy(
            schemes=frozenset(self.fetch_schemes),
            ports=frozenset(self.fetch_ports),
            domains=self.allow_media_domain,
            max_bytes=self.fetch_max_bytes,
            disk_bytes=self.fetch_disk_bytes,
            total_s=self.fetch_timeout_s,
        )
