"""Serves generation: `python -m services.generation --model DIR --listen ADDR --preprocessing ADDR --encoder ADDR`."""

from __future__ import annotations

from functools import partial

import torch

from common.channels import open_channel
from common.checkpoint import Checkpoint
from common.errors import StartupError
from common.exit_status import ExitStatus
from common.guards import upstream_credentials
from common.logs import configure_logging
from common.metrics import begin
from common.room import Room
from common.server import run, serve
from framesieve.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from services.generation.arrivals import ModelInput
from services.generation.blocks import BlockAllocator
from services.generation.detokenise import load_tokenizer
from services.generation.engine import Engine
from services.generation.families import load_language_model
from services.generation.families.language_model import LanguageModel
from services.generation.generation_config import sampling_defaults
from services.generation.graphs import CudaCapture
from services.generation.media import MediaClient
from services.generation.metrics import count_step, watch
from services.generation.prompt_limit import PromptLimit
from services.generation.runner import Runner
from services.generation.servicer import SERVICE, GenerationServicer
from services.generation.settings import GenerationSettings

BLOCK_TOKENS = 16


async def main() -> ExitStatus:
    settings = GenerationSettings.load()
    configure_logging("generation", settings.log_format, settings.log_level)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    credentials = upstream_credentials(settings)
    checkpoint = Checkpoint(settings.model)
    defaults, tokenizer = sampling_defaults(checkpoint), load_tokenizer(checkpoint.folder)
    model = load_language_model(checkpoint, _dtype(settings, checkpoint), _device(settings))
    blocks = -(-settings.kv_cache_tokens // BLOCK_TOKENS)
    runner = Runner(model, blocks, BLOCK_TOKENS)
    limit_tokens = _limit_tokens(settings, model, blocks * BLOCK_TOKENS)
    if model.device.type == "cuda":
        runner.capture_decoding(settings.max_running_requests, limit_tokens, CudaCapture())
    engine = Engine(
        runner,
        BlockAllocator(blocks, BLOCK_TOKENS),
        settings.prefill_chunk_tokens,
        settings.max_running_requests,
        settings.max_waiting_requests,
        settings.speculative_tokens,
        count_step,
    )
    room = Room(settings.media_buffer_bytes)
    begin("generation", "Generate", checkpoint, str(model.dtype).removeprefix("torch."), str(model.device))
    watch(engine, room, settings.max_running_requests, settings.max_waiting_requests)
    engine.start()
    try:
        async with (
            open_channel(settings.preprocessing, credentials) as preprocessing,
            open_channel(settings.encoder, credentials) as encoder,
        ):
            media = MediaClient(preprocessing, encoder, _model_input(checkpoint, model), room)
            limit = PromptLimit(limit_tokens)
            servicer = GenerationServicer(engine, media, tokenizer, defaults, limit, credentials)
            register = partial(add_GenerationServiceServicer_to_server, servicer)
            return await serve(SERVICE, settings, register, lambda: engine.alive)
    finally:
        engine.stop()


def _limit_tokens(settings: GenerationSettings, model: LanguageModel, cache_tokens: int) -> int:
    most = min(model.context_tokens, cache_tokens)
    if settings.max_prompt_tokens is None:
        return most
    if settings.max_prompt_tokens > most:
        raise StartupError(
            f"--max-prompt-tokens {settings.max_prompt_tokens} is more than the model's context of "
            f"{model.context_tokens} tokens or the cache's {cache_tokens} (--kv-cache-tokens)"
        )
    return settings.max_prompt_tokens


def _model_input(checkpoint: Checkpoint, model: LanguageModel) -> ModelInput:
    return ModelInput(
        fingerprint=checkpoint.fingerprint,
        vocab_size=model.embed_tokens.num_embeddings,
        hidden_size=model.hidden_size,
        embed_levels=model.embed_levels,
        dtype=model.dtype,
    )


def _dtype(settings: GenerationSettings, checkpoint: Checkpoint) -> torch.dtype:
    config = checkpoint.config
    own = config.get("dtype") or config.get("torch_dtype") or (config.get("text_config") or {}).get("dtype")
    name = (own or "float32") if settings.dtype == "auto" else settings.dtype
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise StartupError(f"config.json: dtype must name a floating-point type, got {name!r}")
    return dtype


def _device(settings: GenerationSettings) -> torch.device:
    name = ("cuda" if torch.cuda.is_available() else "cpu") if settings.device == "auto" else settings.device
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        raise StartupError(f"--device {name} cannot be used: {error}") from error
    return device


if __name__ == "__main__":
    run(main)
