"""Preprocessing's settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PlainValidator, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from common.contract.errors import StartupError
from common.serving.settings import ServiceSettings
from services.preprocessing.fetch.policy import AllowedDomain, FetchPolicy
from services.preprocessing.video.timing import MAX_LENGTH_S
from services.preprocessing.workers.limits import Limits

# Six hours at 48 frames a second, or one at 240.
_MAX_FRAMES = 2**20

Domain = Annotated[AllowedDomain, PlainValidator(AllowedDomain.parse)]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


class PreprocessingSettings(ServiceSettings):
    """Flags and FRAMESIEVE_… variables of `python -m services.preprocessing`. Lists are parted by commas."""

    model_config = SettingsConfigDict(cli_prog_name="python -m services.preprocessing")

    listen: str = Field("127.0.0.1:50051", description="address to serve on, host:port or unix:/path")
    metrics_port: int = Field(9101, ge=0, le=65535, description="port for Prometheus' /metrics; 0 serves none")
    media_root: Path | None = Field(None, description="folder below which paths may be opened; without it none may")
    allow_media_domain: Annotated[tuple[Domain, ...], NoDecode] = Field(
        (),
        description="hosts that URLs may name, at public addresses, or also in a network given after =: "
        "cdn.example.org,*.example.com,minio=10.20.0.0/16; unless set, every host at public addresses",
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

    decode_workers: int = Field(
        default_factory=_cores,
        ge=1,
        description="processes that decode, one media item each at a time; unless set, one a core",
    )
    inflight_bytes: int = Field(
        2**28, ge=1, description="most bytes of decoded slices that wait for readers; decoding waits when they are full"
    )
    decode_timeout_s: float = Field(
        120.0, gt=0, description="most seconds of work on one media item; then it is refused and its process replaced"
    )
    decode_memory_bytes: int = Field(
        2**31,
        ge=2**26,
        description="most memory that one media item may take; then it is refused and its process replaced",
    )
    decode_max_pixels: int = Field(
        2**38,
        ge=1,
        description="most pixels of one video's frames that are decoded; above, it is refused. The default is an hour "
        "of 1920×1080 at 36 frames a second",
    )
    media_max_bytes: int = Field(2**34, ge=1, description="most bytes of a media file; a larger one is refused")
    media_max_s: int = Field(
        6 * 3600, ge=1, le=MAX_LENGTH_S, description="most seconds that a video may last; a longer one is refused"
    )

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

    @property
    def limits(self) -> Limits:
        """What one media item may cost."""
        return Limits(
            wall_s=self.decode_timeout_s,
            memory_bytes=self.decode_memory_bytes,
            file_bytes=self.media_max_bytes,
            frames=_MAX_FRAMES,
            length_s=self.media_max_s,
            pixels=self.decode_max_pixels,
        )
