"""The encoder's flags and environment variables, beside those that every service has."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from common.settings import ServiceSettings


class EncoderSettings(ServiceSettings, cli_prog_name="python -m services.encoder"):
    """What `python -m services.encoder` is told."""

    listen: str = Field("localhost:50052", description="address to serve on, host:port or unix:/path")
    metrics_port: int = Field(9102, ge=0, le=65535, description="port for Prometheus' /metrics; 0 serves none")
    preprocessing: str = Field("localhost:50051", description="address of the preprocessing service")
    output_buffer_bytes: int = Field(2**30, ge=1, description="room for embeddings before and while they are sent")
    batch_tokens: int = Field(2048, ge=1, description="merged tokens of one forward, at most")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto is the checkpoint's own")
    device: str = Field("auto", description="auto is cuda where there is one, else cpu")
    threads: int = Field(0, ge=0, description="threads of the tower on the CPU; 0 is torch's own choice")

    @property
    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)
