"""The encoder's settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from gridsieve.common.serving.settings import UpstreamSettings


class EncoderSettings(UpstreamSettings):
    """Flags and GRIDSIEVE_… variables of `python -m gridsieve.services.encoder`."""

    model_config = SettingsConfigDict(cli_prog_name="python -m gridsieve.services.encoder")

    listen: str = Field("127.0.0.1:50052", description="address to serve on, host:port or unix:/path")
    metrics_port: int = Field(9102, ge=0, le=65535, description="port of Prometheus' /metrics; 0: no metrics")
    max_requests: int | None = Field(
        1024, ge=1, description="maximum requests that run or wait at a time; further ones are refused; unset: no limit"
    )
    preprocessing: str = Field(
        "127.0.0.1:50051",
        description="address of preprocessing: host:port (all addresses that the name resolves to), unix:/path, "
        "or several ip:port separated by commas",
    )
    output_buffer_bytes: int = Field(
        2**30,
        ge=1,
        description="maximum bytes, over all requests, of unpruned embeddings being encoded and pruned ones to be sent",
    )
    cache_bytes: int = Field(
        2**30, ge=0, description="maximum bytes of unpruned embeddings cached for later requests; 0: no cache"
    )
    batch_tokens: int = Field(
        2048,
        ge=1,
        description="maximum tokens in one forward, of four patches each, whatever the tower makes of them, over all "
        "requests; with --data-parallel, in each rank",
    )
    data_parallel: int = Field(
        1,
        ge=1,
        description="number of processes that share the slices of each forward. Each has its own tower, on the GPUs "
        "from --device on or, for testing, on the CPU. The service ends if one of them ends",
    )
    tower_tensor_parallel: int = Field(
        1,
        ge=1,
        description="number of processes that compute one tower together, each with a part of every layer, on the GPUs "
        "from --device on or, for testing, on the CPU: for towers that one GPU cannot hold. Must divide the tower's "
        "attention heads; for Qwen's and GLM's towers; not with --data-parallel",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="dtype of weights and embeddings; auto: bfloat16 if all weights are stored so and the "
        "processor can multiply it, else float32",
    )
    tower_attention: Literal["auto", "sdpa", "varlen"] = Field(
        "auto",
        description="sdpa (one call for neighbours of one length) or varlen (torch's variable-length flash kernel, one "
        "call for all); auto: varlen on CUDA in half precision if torch has it, else sdpa",
    )
    device: str = Field(
        "auto",
        description="cpu, cuda or cuda:N; auto: cuda if available, else cpu; with several processes, of the first one",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="whether the tower's layers are compiled at startup, which needs a C or C++ compiler, and some "
        "seconds at the first start; auto: unless the tower is very small, or its attention on CUDA is SDPA",
    )
    deterministic: bool = Field(
        False,
        description="each slice of a media item is a forward of its own, so its embeddings have the same bits whatever "
        "is encoded at the same time; --batch-tokens then means nothing",
    )
    step_timeout_s: float | None = Field(
        None,
        gt=0,
        description="seconds that one forward of the tower may take; then health reports NOT_SERVING and the process "
        "ends with status 4, because nothing else ends a device that hangs; unset: 300 on a GPU, no limit on a CPU",
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads per operation, in each rank; unset: torch's default"
    )
