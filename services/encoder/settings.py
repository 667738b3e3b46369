"""The encoder's settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from common.serving.settings import UpstreamSettings


class EncoderSettings(UpstreamSettings):
    """Flags and FRAMESIEVE_… variables of `python -m services.encoder`."""

    model_config = SettingsConfigDict(cli_prog_name="python -m services.encoder")

    listen: str = Field("127.0.0.1:50052", description="address to serve on, host:port or unix:/path")
    metrics_port: int = Field(9102, ge=0, le=65535, description="port for Prometheus' /metrics; 0 serves none")
    preprocessing: str = Field(
        "127.0.0.1:50051",
        description="address of preprocessing: host:port for all that the name stands for, unix:/path, or several "
        "ip:port behind commas",
    )
    output_buffer_bytes: int = Field(
        2**30,
        ge=1,
        description="most bytes of unpruned embeddings being encoded, and of pruned ones being sent, over all requests",
    )
    cache_bytes: int = Field(
        2**30, ge=0, description="most bytes of unpruned embeddings kept for the next question; 0 keeps none"
    )
    batch_tokens: int = Field(
        2048,
        ge=1,
        description="most merged tokens of one forward, over all requests; of each rank where there are more",
    )
    data_parallel: int = Field(
        1,
        ge=1,
        description="ranks that share the slices of each forward, each with a tower of its own, on the card of "
        "--device and those after it or, to try it, on the CPU; the service ends if one of them does",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="of weights and embeddings; auto is bfloat16 where they are stored so, else float32"
    )
    tower_attention: Literal["auto", "sdpa", "varlen"] = Field(
        "auto",
        description="sdpa, one call a sequence, or torch's variable-length flash kernel, one for all; auto is the "
        "latter on CUDA in half precision, where torch has it",
    )
    device: str = Field(
        "auto", description="cpu, cuda or cuda:N; auto is cuda where there is one; of several ranks, the first's"
    )
    threads: int | None = Field(
        None, ge=1, description="threads of one operation on the CPU, of each rank; unset: torch's own choice"
    )
