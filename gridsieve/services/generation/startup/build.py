"""Builds the runner from the settings. Every rank does so, in the same order, as some steps are collective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import structlog
import torch

from gridsieve.common.checkpoint import DRAFTS, Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.families import family_of, not_live
from gridsieve.services.compute.device import device_of, multiplies_bfloat16
from gridsieve.services.compute.graphs import CudaCapture
from gridsieve.services.compute.int4_linear import Int4Linear
from gridsieve.services.compute.packed_linear import JoinedLinear, PackedLinear
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.loading.draft_head import load_draft_head
from gridsieve.services.generation.loading.int4 import int4_format, stored_format
from gridsieve.services.generation.loading.mtp import MTP, load_mtp
from gridsieve.services.generation.loading.quantization_config import is_quantised
from gridsieve.services.generation.model.determinism import made_deterministic
from gridsieve.services.generation.model.draft_head import DraftHead
from gridsieve.services.generation.model.experts import rows_without_wait
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.runner import OtherRanks, Runner
from gridsieve.services.generation.model.separate_experts import has_separate_experts
from gridsieve.services.generation.parallel.group import Group
from gridsieve.services.generation.settings import GenerationSettings
from gridsieve.services.generation.startup.adapters import load_adapters
from gridsieve.services.generation.startup.cache_size import CudaMemory, Sizes, measure
from gridsieve.services.generation.startup.same_bits import use_equal_sizes

BLOCK_TOKENS = 16
CPU_CACHE_TOKENS = 32768
# Beside it, for live sessions: three of the default size.
CPU_LIVE_TOKENS = 16384
# Context length at which the largest step is measured if --max-model-len is unset. Without a kernel that reads paged
# blocks, a step needs more memory for a longer context, so longer prompts may run out of memory.
UNLIMITED_CONTEXT_TOKENS = 32768
# Compiling takes some seconds a layer and saves about 0.1 ms a layer and step: too long for models of a few weights,
# too little where a layer's weights alone take several milliseconds to read.
COMPILED_FROM_WEIGHTS = 4_000_000
COMPILED_TO_LAYER_WEIGHTS = 2**24

log = structlog.get_logger()


# Of recurrent states: the one that a running sequence has, the one that its next chunk writes, and with draft tokens
# the one before these.
SLOTS_PER_SEQUENCE = 2
# Kept for prefix cache hits by default: as many as fit into SNAPSHOT_BYTES, within these.
MIN_SNAPSHOTS, MAX_SNAPSHOTS, SNAPSHOT_BYTES = 8, 64, 2**31


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Of one step: its tokens, and the sequences that run."""

    max_num_batched_tokens: int
    max_num_seqs: int


# Defaults: of devices below LARGE_FROM_BYTES, and from there on.
SMALL, LARGE = StepLimits(2048, 64), StepLimits(8192, 256)
LARGE_FROM_BYTES = 40 * 10**9


@dataclass(frozen=True, slots=True)
class Built:
    """blocks: size of the KV cache; limit_tokens: maximum length of a prompt with its answer; state_slots: of recurrent
    states, 0 for models without any; live_blocks: those of the cache that live sessions may own."""

    runner: Runner
    blocks: int
    live_blocks: int
    state_slots: int
    limit_tokens: int
    limits: StepLimits


def build(
    settings: GenerationSettings,
    checkpoint: Checkpoint,
    group: Group | None = None,
    workers: OtherRanks | None = None,
) -> Built:
    """Loads model, adapters and the head that drafts, sizes the KV cache and captures decode steps.

    group: this rank's; workers: on rank 0, the other ranks. Raises StartupError if the settings cannot be met.
    """
    device = device_of(settings.device, "--tensor-parallel", settings.tensor_parallel, group.rank if group else 0)
    limits = step_limits(settings, device, group)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # some kernels and quantizers use the current device
    dtype = _dtype(settings, checkpoint, device)
    model = load_language_model(checkpoint, dtype, device, group, settings.quantization)
    model = replace(model, fp8_cache=settings.kv_cache_dtype == "fp8")
    load_adapters(settings.adapters, model, group)
    if settings.deterministic:
        model = made_deterministic(model)
    if settings.draft_model and model.reads:
        raise StartupError(f"--draft-model: a model that {checkpoint.task}s generates no tokens to draft")
    if settings.draft_model and (group is None or group.rank == 0):  # others get the tokens that it drafts
        model = replace(model, draft=_draft_head(settings.draft_model, checkpoint, model))
    limits, state_slots = with_states(settings, limits, model, _memory_bytes(device, group))
    live_tokens = _live_tokens(settings, checkpoint, device)
    blocks = -(-_cache_tokens(settings, limits, state_slots, model, group, live_tokens or 0) // BLOCK_TOKENS)
    live_blocks = _live_blocks(settings, model, blocks, live_tokens)
    limit_tokens = _limit_tokens(settings, model, (blocks - live_blocks) * BLOCK_TOKENS)
    runner = Runner(model, blocks, BLOCK_TOKENS, workers, state_slots)
    if group is None and _compiles(settings, checkpoint, model):
        runner.compile()
    if settings.deterministic:
        use_equal_sizes(runner, blocks, BLOCK_TOKENS, group)
    if model.device.type == "cuda":
        _capture(runner, limits.max_num_seqs, limit_tokens, group, settings.max_draft_tokens)
    return Built(runner, blocks, live_blocks, state_slots, limit_tokens, limits)


def _draft_head(named: Path, checkpoint: Checkpoint, model: LanguageModel) -> DraftHead:
    """checkpoint: of the model."""
    own = str(named) == MTP
    head = load_mtp(checkpoint, model) if own else load_draft_head(Checkpoint.find(named, DRAFTS), model)
    log.info("drafting", head=str(named), layers=head.sizes.layers)
    return head


def step_limits(settings: GenerationSettings, device: torch.device, group: Group | None = None) -> StepLimits:
    """Those that are set, else by the memory of the smallest device. Raises StartupError if they contradict."""
    memory = _memory_bytes(device, group)
    default = LARGE if memory >= LARGE_FROM_BYTES else SMALL
    tokens, requests = settings.max_num_batched_tokens, settings.max_num_seqs
    if tokens is None:
        tokens = max(default.max_num_batched_tokens, requests or 0)
    if requests is None:
        requests = min(default.max_num_seqs, tokens)
    if tokens < requests:
        raise StartupError(
            f"--max-num-batched-tokens {tokens} is below --max-num-seqs {requests}: a step computes a token of each "
            f"sequence that decodes"
        )
    limits = StepLimits(tokens, requests)
    log.info("limits of a step", **asdict(limits), device_bytes=memory or None)
    return limits


def with_states(
    settings: GenerationSettings, limits: StepLimits, model: LanguageModel, memory_bytes: int
) -> tuple[StepLimits, int]:
    """The limits of a step, and the number of slots of recurrent states: 0 for models without any.

    memory_bytes: of the smallest device, 0 on a CPU. Where --max-num-seqs is unset, states of running sequences take at
    most a quarter of it. Raises StartupError if --state-slots is too small.
    """
    if model.states is None:
        return limits, 0
    size, each = model.states.bytes, SLOTS_PER_SEQUENCE + bool(settings.max_draft_tokens)
    if memory_bytes and settings.max_num_seqs is None:
        fitting = max(1, memory_bytes // (4 * each * size))
        limits = replace(limits, max_num_seqs=min(limits.max_num_seqs, fitting))
    least = each * limits.max_num_seqs
    slots = settings.state_slots
    if slots is None:
        slots = least + min(MAX_SNAPSHOTS, max(MIN_SNAPSHOTS, SNAPSHOT_BYTES // size))
    if slots < least:
        raise StartupError(
            f"--state-slots {slots} must be at least {least}: {each} for each running sequence "
            f"(--max-num-seqs {limits.max_num_seqs})"
        )
    log.info("recurrent states", slots=slots, state_bytes=size, max_num_seqs=limits.max_num_seqs)
    return limits, slots


def _memory_bytes(device: torch.device, group: Group | None) -> int:
    """Of the smallest device; 0 on a CPU."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return group.least(memory) if group else memory


def _compiles(settings: GenerationSettings, checkpoint: Checkpoint, model: LanguageModel) -> bool:
    if model.device.type != "cpu" or settings.adapters or settings.deterministic:
        return False
    if (is_quantised(checkpoint) and stored_format(checkpoint) is None) or has_separate_experts(model.text):
        return False
    layers = [each for each in model.text.modules() if isinstance(each, PackedLinear | JoinedLinear | Int4Linear)]
    weights = sum(each.in_features * each.out_features for each in layers)
    small = weights >= COMPILED_FROM_WEIGHTS and weights <= model.layers * COMPILED_TO_LAYER_WEIGHTS
    return settings.compile == "on" or (settings.compile == "auto" and small)


def _cache_tokens(
    settings: GenerationSettings,
    limits: StepLimits,
    state_slots: int,
    model: LanguageModel,
    group: Group | None,
    live_tokens: int,
) -> int:
    """Size of the KV cache: the setting, else what fits. Raises StartupError if no prompt fits."""
    if settings.kv_cache_tokens is not None:
        return settings.kv_cache_tokens
    if model.device.type != "cuda":
        return CPU_CACHE_TOKENS + live_tokens
    memory = CudaMemory(model.device)
    capture = partial(_capture, group=group, max_draft_tokens=settings.max_draft_tokens)
    return fitting_tokens(settings, limits, model, group, memory, capture, state_slots)


def fitting_tokens(
    settings: GenerationSettings,
    limits: StepLimits,
    model: LanguageModel,
    group: Group | None,
    memory: CudaMemory,
    capture: Callable[[Runner, int, int], object],
    state_slots: int = 0,
) -> int:
    """The number of tokens, in whole blocks, whose keys and values fit on the device of every rank.

    capture: captures a runner's decode steps of up to the given number of sequences, of up to the given number of
        tokens.
    Raises StartupError, with the measured sizes, if not even one prompt fits.
    """
    longest = min(model.context_tokens, settings.max_model_len or model.context_tokens)
    context = min(longest, settings.max_model_len or UNLIMITED_CONTEXT_TOKENS)
    rows, requests = limits.max_num_batched_tokens, limits.max_num_seqs
    sampled = _decoded_rows(settings, limits)
    sizes = Sizes(rows, sampled, min(requests, sampled), max(rows, context))
    try:
        needs = measure(model, BLOCK_TOKENS, sizes, memory, lambda each: capture(each, requests, longest))
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"a step of {rows} tokens (--max-num-batched-tokens) of a prompt of {context} (--max-model-len) does not "
            f"fit on {model.device}: {error}"
        ) from error
    token_bytes = model.token_bytes
    states_bytes = state_slots * model.states.bytes if model.states else 0
    own = needs.cache_tokens(settings.gpu_memory_fraction, token_bytes, BLOCK_TOKENS, states_bytes)
    tokens = group.least(own) if group else own
    log.info(
        "kv cache",
        tokens=tokens,
        fits=own,
        token_bytes=token_bytes,
        fraction=settings.gpu_memory_fraction,
        states_bytes=states_bytes,
        **{f"{name}_bytes": value for name, value in asdict(needs).items()},
    )
    least = settings.max_model_len or min(rows, longest)
    if tokens < least:
        sizes_gib = ", ".join(f"{name} {value / 2**30:.2f}" for name, value in asdict(needs).items())
        raise StartupError(
            f"{max(0, tokens)} tokens of KV cache fit in {settings.gpu_memory_fraction:g} of a device "
            f"(--gpu-memory-fraction), a prompt needs {least}; in GiB: {sizes_gib}; a token takes {token_bytes} bytes"
        )
    return tokens


def _capture(runner: Runner, max_sequences: int, max_tokens: int, group: Group | None, max_draft_tokens: int) -> None:
    """All ranks replay decode steps, or none does: a rank would wait for ever for one that computes another step.

    A model that reads never decodes.
    """
    if runner.model.reads or (group and not group.least(int(runner.captures))):
        return
    if has_separate_experts(runner.model.text):  # the host waits for the device in each layer
        return
    sequences = rows_without_wait(runner.model.text, max_sequences)
    captured = runner.capture_decoding(sequences, max_tokens, CudaCapture(runner.model.device), max_draft_tokens)
    if group:
        remedy = "if memory is short on its device, lower --max-num-seqs or --gpu-memory-fraction"
        group.end_unless_alike(captured, "capturing decode steps as graphs", remedy)


def _decoded_rows(settings: GenerationSettings, limits: StepLimits) -> int:
    """The most rows of a step of decodes: a token of each sequence, and its draft tokens."""
    return min(limits.max_num_batched_tokens, limits.max_num_seqs * (1 + settings.max_draft_tokens))


def _live_tokens(settings: GenerationSettings, checkpoint: Checkpoint, device: torch.device) -> int | None:
    """The most that live sessions may hold; None: what the longest sequence leaves. Raises StartupError."""
    if not family_of(checkpoint).live or checkpoint.task != "generate":
        if settings.live_tokens:
            why = not_live() if checkpoint.task == "generate" else f"a model to {checkpoint.task} has no live sessions"
            raise StartupError(f"--live-tokens: {why}")
        return 0
    if settings.live_tokens is None and settings.kv_cache_tokens is None and device.type != "cuda":
        return CPU_LIVE_TOKENS
    return settings.live_tokens


def _live_blocks(settings: GenerationSettings, model: LanguageModel, blocks: int, live_tokens: int | None) -> int:
    """The most that live sessions may own of the cache's blocks. Raises StartupError if that leaves nothing."""
    if live_tokens is None:
        longest = _limit_tokens(settings, model, blocks * BLOCK_TOKENS)
        return min(blocks // 4, blocks - -(-longest // BLOCK_TOKENS))
    live_blocks = -(-live_tokens // BLOCK_TOKENS)
    if live_blocks >= blocks:
        raise StartupError(
            f"--live-tokens {live_tokens} leaves nothing of a KV cache of {blocks * BLOCK_TOKENS} tokens"
        )
    return live_blocks


def _limit_tokens(settings: GenerationSettings, model: LanguageModel, cache_tokens: int) -> int:
    most = min(model.context_tokens, cache_tokens)
    if settings.max_model_len is None:
        return most
    if settings.max_model_len > most:
        raise StartupError(
            f"--max-model-len {settings.max_model_len} exceeds the model's context length of "
            f"{model.context_tokens} tokens or the KV cache of {cache_tokens} (--kv-cache-tokens)"
        )
    return settings.max_model_len


def _dtype(settings: GenerationSettings, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    if settings.dtype == "auto" and int4_format(checkpoint, settings.quantization == "int4") is not None:
        return torch.bfloat16  # torch's products in int4 have no other dtype
    config = checkpoint.config
    own = config.get("dtype") or config.get("torch_dtype") or checkpoint.text_config.get("dtype")
    name = (own or "float32") if settings.dtype == "auto" else settings.dtype
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise StartupError(f"config.json: dtype must be a floating-point dtype, got {name!r}")
    if settings.dtype == "auto" and dtype == torch.bfloat16 and device.type == "cpu" and not multiplies_bfloat16():
        return torch.float32
    return dtype
