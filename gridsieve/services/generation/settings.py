"""The settings of the generation service."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.retention import (
    AUTO_THRESHOLD,
    BEFORE_TOWER,
    EVS,
    METHODS,
    PIXEL_CHANGE,
    TRAINED_RATE,
    ItemPruning,
    named_method,
)
from gridsieve.common.serving.settings import UpstreamSettings
from gridsieve.families import ModelFamily

# Two numbers have the same sum in either order.
MAX_DETERMINISTIC_RANKS = 2


class GenerationSettings(UpstreamSettings):
    """Flags and GRIDSIEVE_ variables of `python -m gridsieve.services.generation`."""

    model_config = SettingsConfigDict(cli_prog_name="python -m gridsieve.services.generation")

    listen: str = Field("127.0.0.1:50053", description="address to serve on, host:port or unix:/path")
    metrics_port: int = Field(9103, ge=0, le=65535, description="port of Prometheus' /metrics; 0: no metrics")
    preprocessing: str = Field(
        "127.0.0.1:50051",
        description="address of preprocessing, used for prompts without media: host:port (all addresses that the name "
        "resolves to), unix:/path, or several ip:port separated by commas",
    )
    encoder: str = Field("127.0.0.1:50052", description="address of the encoder, in the same formats")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="maximum number of tokens in one step, over all requests; unset: 8192 on CUDA devices from 40 GB "
        "on, else 2048, and at least --max-num-seqs",
    )
    kv_cache_tokens: int | None = Field(
        None,
        ge=1,
        description="size of the KV cache in tokens, over all requests; unset: 32768 on the CPU, beside those of "
        "--live-tokens; on CUDA as many as fit into the memory that the largest step leaves free, measured at startup",
    )
    state_slots: int | None = Field(
        None,
        ge=2,
        description="slots of recurrent states, for models whose layers keep one, such as Qwen3.5: two for each of "
        "--max-num-seqs, three with draft tokens, the others keep states of live sessions, one each, and for prefix "
        "cache hits; unset: up to 64 others, as many as fit into 2 GiB",
    )
    gpu_memory_fraction: float = Field(
        0.9,
        gt=0,
        le=1,
        description="fraction of a CUDA device's memory that all processes together may use; "
        "ignored with --kv-cache-tokens",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="maximum number of tokens of one sequence: the prompt after pruning and its answer; "
        "unset: the smaller of the model's context length and the KV cache",
    )
    live_tokens: int | None = Field(
        None,
        ge=0,
        description="tokens of the KV cache that live sessions may hold together, each what it asked for, from its "
        "opening to its end; other requests cannot count on them; 0: no live sessions; unset: 0 for models that are "
        "not served live; else 16384 on the CPU without --kv-cache-tokens; else a quarter of the cache, as far as the "
        "longest sequence (--max-model-len) leaves it",
    )
    pruning_rate: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="fraction of each video's tokens to drop where a request names no rate; a request may name any, 0 "
        f"included; unset: {TRAINED_RATE} of the checkpoint's config; without that, or with --pruning-threshold, 0",
    )
    pruning_method: str | None = Field(
        None,
        description=f"which tokens are kept where a request names no method: {', '.join(METHODS)}; unset: "
        f"{PIXEL_CHANGE} with --pruning-threshold; else {EVS} if the checkpoint's config has a {TRAINED_RATE} or the "
        f"model does not take {PIXEL_CHANGE}; else {PIXEL_CHANGE}",
    )
    pruning_threshold: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="where a request names neither rate, method nor threshold, drop tokens whose pixels "
        "changed by less than this share of their range and at least --pruning-rate; for methods before the tower "
        f"({', '.join(BEFORE_TOWER)}), such as {AUTO_THRESHOLD:g}; unset: the rate alone decides",
    )
    media_buffer_bytes: int = Field(
        2**30,
        ge=1,
        description="maximum bytes of media embeddings on the host, over all requests; live sessions may hold as many "
        "bytes of pictures together",
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        description="maximum number of sequences that run at the same time; unset: 256 on CUDA devices from 40 GB on, "
        "else 64, and at most --max-num-batched-tokens",
    )
    max_waiting_requests: int = Field(
        256, ge=0, description="maximum number of requests in the waiting queue; more are refused"
    )
    speculative_tokens: int = Field(
        0,
        ge=0,
        le=16,
        description="maximum number of draft tokens per sequence and step, found by n-gram lookup in prompt and "
        "answer; does not change answers; 0 turns speculative decoding off",
    )
    draft_model: Path | None = Field(
        None,
        description="what drafts tokens for the model: an EAGLE-3 head, a folder or Hugging Face repository of a "
        "LlamaForCausalLMEagle3 or Eagle3LlamaForCausalLM; or mtp: the multi-token prediction of the model's own "
        "checkpoint, of the Qwen3.5 line; does not change answers; not with --speculative-tokens; unset: none",
    )
    num_draft_tokens: int = Field(
        3,
        ge=1,
        le=16,
        description="maximum number of tokens that --draft-model drafts per sequence and step; fewer or none for "
        "requests for which drafting takes longer than it saves",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="dtype of weights and KV cache; auto: the checkpoint's, but float32 instead of bfloat16 on a CPU "
        "that cannot multiply it, and bfloat16 with weights in 4 bits, which are slow in others",
    )
    quantization: Literal["none", "int4", "fp8"] = Field(
        "none",
        description="what linear layers of the text model are rounded to while they are read; answers are "
        "approximate. int4: 4 bits, the nearest of 16 values for each group of 128 inputs; fp8: float8_e4m3fn with a "
        "scale for each block of 128 by 128, which saves memory and time on Hopper alone, not with --tensor-parallel. "
        "Embeddings, output layer, experts and gates stay as they are. Checkpoints that are stored in 4 bits or fp8 "
        "need no flag",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="dtype of the KV cache; auto: that of --dtype; fp8: float8_e4m3fn with a scale of 1, one byte a "
        "value, rounded, and saturated beyond 448. On CUDA it needs FlashInfer to be read in place",
    )
    device: str = Field("auto", description="cpu, cuda or cuda:N; auto: cuda if available, else cpu")
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="number of tensor-parallel ranks, each a process with a part of every layer; on CUDA each uses one "
        "device, starting at --device. Must divide the model's attention heads, and divide its KV heads or be a "
        "multiple of them",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="whether the text model is compiled for the CPU at startup, which needs a C++ compiler, and some "
        "seconds a layer at the first start; auto: unless it is very small, or its layers are large. Never with "
        "adapters, tensor parallelism, quantised experts, or quantised weights other than those in 4 bits, nor with "
        "--deterministic",
    )
    deterministic: bool = Field(
        False,
        description="an answer has the same bits whatever is computed at the same time, in whichever chunks, with or "
        "without draft tokens, prefix cache hits and preemption. Takes longer; set it for the encoder, too",
    )
    step_timeout_s: float | None = Field(
        None,
        gt=0,
        description="seconds that one step of the engine may take; then health reports NOT_SERVING and the process "
        "ends with status 4, because nothing else ends a device that hangs; unset: 300 on a GPU, no limit on a CPU",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads per operation; unset: torch's default")

    @field_validator("pruning_method")
    @classmethod
    def _known_method(cls, value: str | None) -> str | None:
        if value is not None and value not in METHODS:
            raise ValueError(f"must be one of {', '.join(METHODS)}")
        return value

    @model_validator(mode="after")
    def _threshold_of_its_method(self) -> Self:
        method = named_method(self.pruning_method, self.pruning_threshold)
        if self.pruning_threshold is not None and method not in BEFORE_TOWER:
            raise ValueError(f"--pruning-threshold is for {', '.join(BEFORE_TOWER)}, the method is {method}")
        return self

    @model_validator(mode="after")
    def _one_kind_of_drafts(self) -> Self:
        if self.draft_model and self.speculative_tokens:
            raise ValueError("--draft-model and --speculative-tokens are two kinds of draft tokens: choose one")
        return self

    @model_validator(mode="after")
    def _deterministic_sums(self) -> Self:
        if self.deterministic and self.tensor_parallel > MAX_DETERMINISTIC_RANKS:
            raise ValueError(
                f"--deterministic needs --tensor-parallel of at most {MAX_DETERMINISTIC_RANKS}, got "
                f"{self.tensor_parallel}: in which order more ranks are added up depends on a row's place"
            )
        if self.deterministic and self.compile == "on":
            raise ValueError("--deterministic is not supported with --compile on: set auto or off")
        return self

    @property
    def max_draft_tokens(self) -> int:
        """Per sequence and step, of either kind."""
        return self.num_draft_tokens if self.draft_model else self.speculative_tokens

    def pruning(self, config: Mapping[str, Any], usual: str) -> ItemPruning:
        """Of videos for which a request names none. config: of the checkpoint. usual: the method of a rate without one.

        Raises StartupError if the config has a rate that is not at least 0 and below 1.
        """
        method, rate = named_method(self.pruning_method, self.pruning_threshold, usual), self.pruning_rate
        if rate is None:
            rate = 0.0 if self.pruning_threshold is not None else config.get(TRAINED_RATE) or 0.0
            if not isinstance(rate, int | float) or not 0 <= rate < 1:
                raise StartupError(f"config.json: {TRAINED_RATE} must be at least 0 and below 1, got {rate!r}")
        return ItemPruning(float(rate), method, threshold=self.pruning_threshold)


def check_pruning(family: ModelFamily, pruning: ItemPruning) -> None:
    """Raises StartupError if the encoder would refuse every request whose videos are pruned so."""
    if pruning.drops and pruning.method not in family.methods:
        threshold = "" if pruning.threshold is None else f" and --pruning-threshold {pruning.threshold:g}"
        raise StartupError(
            f"--pruning-method {pruning.method} at --pruning-rate {pruning.rate:g}{threshold}: must be one of "
            f"{', '.join(family.methods)} for this model: {family.why_not_all}"
        )
