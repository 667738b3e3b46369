"""Preprocessing's settings."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PlainValidator, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from gridsieve.common.contract.errors import StartupError
from gridsieve.common.process import cores
from gridsieve.common.serving.settings import ServiceSettings, separated
from gridsieve.services.preprocessing.fetch.policy import AllowedDomain, FetchPolicy
from gridsieve.services.preprocessing.video.timing import MAX_LENGTH_S
from gridsieve.services.preprocessing.workers.limits import Limits

# Six hours at 48 frames a second, or one at 240.
_MAX_FRAMES = 2**20

Domain = Annotated[AllowedDomain, PlainValidator(AllowedDomain.parse)]

# One converts and resizes while the card decodes for the other; each takes memory of the card.
_CARD_WORKERS = 2


class PreprocessingSettings(ServiceSettings):
    """Flags and GRIDSIEVE_… variables of `python -m gridsieve.services.preprocessing`. Commas separate lists."""

    model_config = SettingsConfigDict(cli_prog_name="python -m gridsieve.services.preprocessing")

    listen: str = Field("127.0.0.1:50051", description="address to serve on, host:port or unix:/path")
    metrics_port: int = Field(9101, ge=0, le=65535, description="port of Prometheus' /metrics; 0: no metrics")
    max_requests: int | None = Field(
        1024, ge=1, description="maximum requests that run or wait at a time; further ones are refused; unset: no limit"
    )
    media_root: Path | None = Field(
        None,
        description="folder below which requests may read files by path or file URL; unset: requests cannot name files",
    )
    upload_root: Path | None = Field(
        None,
        description="folder of files that were uploaded to the gateway, the same as its --upload-root; unset: requests "
        "cannot name uploads",
    )
    allow_media_domain: Annotated[tuple[Domain, ...], NoDecode] = Field(
        (),
        description="hosts that URLs may name, for example cdn.example.org,*.example.com,minio=10.20.0.0/16. Their "
        "addresses must be public or in the network after =. Unset: every host with a public address",
    )
    fetch_schemes: Annotated[tuple[Literal["http", "https", "rtsp", "rtsps"], ...], NoDecode] = Field(
        ("http", "https", "rtsp", "rtsps"),
        description="allowed schemes of URLs: some of http,https and, for live streams alone, rtsp,rtsps; '' turns "
        "fetching off",
    )
    fetch_ports: Annotated[tuple[Annotated[int, Field(ge=1, le=65535)], ...], NoDecode] = Field(
        (80, 443, 554, 322), description="allowed ports of URLs, for example 80,443,9000"
    )
    media_credentials_file: Path | None = Field(
        None,
        description="file in netrc's format (machine camera.lan login NAME password WORD) with the user names and "
        "passwords of hosts that live streams come from; every caller can watch these hosts with them",
    )
    fetch_max_bytes: int = Field(
        2**30, ge=1, description="maximum bytes of one fetched URL; a live stream has no limit"
    )
    fetch_disk_bytes: int = Field(
        2**32, ge=1, description="maximum bytes of all fetched media in TMPDIR together; fetches beyond it are refused"
    )
    fetch_timeout_s: float = Field(
        60.0,
        gt=0,
        description="maximum seconds for fetching a URL, from the name lookup to the last byte; of a live stream, to "
        "its first byte, and from each byte to the next",
    )
    max_streams: int | None = Field(
        None,
        ge=0,
        description="maximum streams of encoded video that live sessions watch at a time, each with a decoding "
        "process of its own, of --decode-memory-bytes; further ones are refused; unset: while the processes of cameras "
        "use less than three quarters of the cores, a quarter of the memory has 64 MiB for each, and half of "
        "--max-requests suffices; the log says how many",
    )

    decoder: Literal["cpu", "nvdec"] = Field(
        "cpu",
        description="what decodes videos: the CPU, or an NVIDIA card, which may conceal damage without a report and "
        "needs processes that are confined less (docs/security.md). Frames are the same",
    )
    decode_workers: int = Field(
        default_factory=lambda: ceil(cores()),
        ge=1,
        description="number of decoding processes, each with one media item at a time; default: one per core, with "
        "--decoder nvdec 2. Headers and indexes are read by half as many, at least 2, and prompts laid out by as many "
        "threads, at least 4",
    )
    inflight_bytes: int = Field(
        2**28,
        ge=1,
        description="maximum bytes of decoded slices that are not sent yet; decoding pauses at the limit. As many more "
        "are held until tokens are chosen; what does not fit is decoded again",
    )
    decode_timeout_s: float = Field(
        120.0,
        gt=0,
        description="maximum seconds of work on one media item without progress; beyond it, the item is refused and "
        "its process replaced",
    )
    decode_frame_s: float = Field(
        10.0,
        gt=0,
        description="maximum seconds of work for each frame that is asked for, on average, beside --decode-timeout-s",
    )
    decode_memory_bytes: int = Field(
        2**31,
        ge=2**26,
        description="maximum memory for one media item; beyond it, the item is refused and its process replaced",
    )
    require_sandbox: bool = Field(
        False,
        description="refuse to start where the kernel does not confine decoding processes by namespaces and Landlock",
    )
    media_max_bytes: int = Field(2**34, ge=1, description="maximum bytes of a media file")
    media_max_s: int = Field(6 * 3600, ge=1, le=MAX_LENGTH_S, description="maximum seconds of a video")

    @field_validator("allow_media_domain", "fetch_schemes", "fetch_ports", mode="before")
    @classmethod
    def _parted(cls, value: object) -> object:
        return separated(value)

    @model_validator(mode="after")
    def _one_fits_the_disk(self) -> Self:
        if self.fetch_max_bytes > self.fetch_disk_bytes:
            raise StartupError(
                f"--fetch-max-bytes {self.fetch_max_bytes} must be at most --fetch-disk-bytes {self.fetch_disk_bytes}"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _few_use_a_card(cls, given: dict[str, object]) -> dict[str, object]:
        return {"decode_workers": _CARD_WORKERS, **given} if given.get("decoder") == "nvdec" else given

    @model_validator(mode="after")
    def _a_card_excludes_the_sandbox(self) -> Self:
        if self.require_sandbox and self.decoder == "nvdec":
            raise StartupError("--require-sandbox excludes --decoder nvdec, whose processes are confined less")
        return self

    @property
    def fetch_policy(self) -> FetchPolicy:
        """The policy of fetching, from the flags."""
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
        """The limits of one job, from the flags."""
        return Limits(
            stall_s=self.decode_timeout_s,
            frame_s=self.decode_frame_s,
            memory_bytes=self.decode_memory_bytes,
            file_bytes=self.media_max_bytes,
            frames=_MAX_FRAMES,
            length_s=self.media_max_s,
        )
