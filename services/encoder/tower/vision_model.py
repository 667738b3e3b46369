"""Makes a vision tower from a checkpoint and transformers' class for it.

It knows no family: a family's file names the classes, and extracts the embeddings from their output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framesieve.common.checkpoint import Checkpoint
from framesieve.common.contract.errors import StartupError
from framesieve.common.contract.retention import METHODS
from framesieve.common.fields import refusing
from framesieve.services.compute.packed_linear import pack_linears
from framesieve.services.encoder.tower.adapted import Adaptable, linear_layers
from framesieve.services.encoder.tower.attention import VARLEN, Wanted, attend_by_length, find_attention
from framesieve.services.encoder.tower.packing import PackedLayout, TowerShape
from framesieve.services.encoder.tower.parallel.division import Share, divide
from framesieve.services.encoder.tower.patches import FoldedPatchEmbed, PatchShape, read_normalisation
from framesieve.services.encoder.tower.saturation import saturate
from framesieve.services.encoder.tower.tower import ModelForward, Tower, TowerSizes
from framesieve.services.encoder.tower.weights import choose_dtype, fill, find_weights, read_weights

# Of Qwen3-VL's checkpoints, and of Qwen2.5-VL's published ones.
PREFIXES = ("model.visual.", "visual.")
PATCH_EMBED = "patch_embed.proj."
ALIGNED_WIDTH = 128
# Of the tower's modules in the whole model, to which adapters are trained.
_PEFT_PREFIX = "visual."
# Modules that multiply each of their inputs by all of their weights. The only convolution merges patches to tokens.
_PRODUCTS = (nn.Linear, nn.Conv2d)


def vision_config(checkpoint: Checkpoint, config_class: Any) -> Any:
    """vision_config of config.json as transformers' config class. Raises StartupError if it is absent or malformed."""
    if not checkpoint.config.part("vision_config"):
        raise StartupError(f"{checkpoint.folder}/config.json has no vision_config")
    config = checkpoint.config_as(config_class, part="vision_config")
    config._attn_implementation = "sdpa"
    return config


def make_tower(
    checkpoint: Checkpoint,
    config: Any,
    model_class: Any,
    rotary_class: Any,
    shape: TowerShape,
    keywords: Callable[[PackedLayout[Tensor]], Mapping[str, Any]],
    hidden: int,
    embed_dim: int,
    dtype: str,
    device: torch.device,
    attention: Wanted,
    levels: Callable[[Any], Tensor] = lambda output: output.pooler_output[None],
    embed_levels: int = 0,
    windowed_layers: int = 0,
    share: Share | None = None,
) -> Tower:
    """A tower that runs `model_class(config)` with the checkpoint's weights.

    rotary_class: of its `rotary_pos_emb`. keywords: the layout as keyword arguments of the model's forward, which
    otherwise computes it. levels: converts its output to (1 + embed_levels, P / merge², embed_dim); by default it has
    the embedding alone. hidden: width of a patch inside the model. share: of its layers; None: all of them.
    Raises StartupError if the checkpoint's tower is incomplete or cannot be divided, or the attention is unavailable.
    """
    with torch.device("meta"), refusing("config.json: vision_config"):
        model = model_class(config)
    cuts = divide(model.blocks, share, "blocks.") if share else {}
    stored = find_weights(checkpoint, PREFIXES)
    runs_in = choose_dtype(stored, dtype, device)
    if share and runs_in == torch.float16:
        raise StartupError(
            f"--dtype float16 with --tower-tensor-parallel {share.ranks}: sums of several ranks overflow it, use "
            f"bfloat16 or float32"
        )
    weights = read_weights(stored, runs_in, device, PATCH_EMBED, cuts)
    fill(model, weights, runs_in)
    # Made again off the meta device: its frequencies are computed, not stored, and stay float32.
    model.rotary_pos_emb = rotary_class(config)
    model.patch_embed = FoldedPatchEmbed(
        weights[f"{PATCH_EMBED}weight"],
        weights.get(f"{PATCH_EMBED}bias"),
        read_normalisation(checkpoint),
        runs_in,
    )
    if runs_in == torch.float16:
        saturate(model)
    sizes, linear = _sizes(model, hidden, shape, windowed_layers), linear_layers(model, _PEFT_PREFIX)
    if device.type == "cuda":
        align_mlps(model)
    pack_linears(model.eval().requires_grad_(False).to(device))
    heads = config.num_heads
    attend = find_attention(attention, device, runs_in, heads // (share.ranks if share else 1), hidden // heads)
    extra = {"attend": attend} if attend else {}
    varlen = attend not in (None, attend_by_length)
    if attend:
        # The private name: transformers' setter accepts no names with "flash" except its own.
        config._attn_implementation_internal = VARLEN

    def compute(model: Any, patches: Tensor, layout: PackedLayout[Tensor]) -> Tensor:
        # Without grid_thw, from which the model would compute the layout on the device.
        return levels(model(patches, **{"grid_thw": None, **keywords(layout), **extra}))

    return Tower(
        forward=ModelForward(partial(compute, model), shape, device, varlen, model.blocks),
        patches=PatchShape(config.patch_size, config.spatial_merge_size, config.temporal_patch_size),
        embed_dim=embed_dim,
        embed_levels=embed_levels,
        dtype=runs_in,
        device=device,
        sizes=sizes,
        pruning_methods=METHODS,
        adaptable=None if share else Adaptable(model, compute, linear, _PEFT_PREFIX),
    )


def align_mlps(model: nn.Module) -> None:
    """Widens gated MLPs by zeros to a multiple of ALIGNED_WIDTH, which changes no result.

    cuBLAS has no fast products for the 3420 of Qwen2.5-VL's towers: rows must begin at multiples of 16 bytes.
    """
    for module in model.modules():
        if not all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
            continue
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear: Any = getattr(module, name)
            (outputs, inputs), is_last = linear.weight.shape, name == "down_proj"
            missing = -(inputs if is_last else outputs) % ALIGNED_WIDTH
            linear.weight.data = F.pad(linear.weight.data, (0, missing) if is_last else (0, 0, 0, missing))
            if is_last:
                linear.in_features += missing
                continue
            linear.out_features += missing
            if linear.bias is not None:
                linear.bias.data = F.pad(linear.bias.data, (0, missing))


def _sizes(model: Any, hidden: int, shape: TowerShape, windowed_layers: int) -> TowerSizes:
    """Matrices in blocks, and the patch embedding, apply to every patch; the others to merged tokens."""
    in_blocks, elsewhere = (
        sum(each.weight.numel() for name, each in model.named_modules() if isinstance(each, _PRODUCTS) and where(name))
        for where in (lambda name: name.startswith("blocks."), lambda name: not name.startswith("blocks."))
    )
    return TowerSizes(
        hidden=hidden,
        patch_weights=in_blocks + model.patch_embed.weight.numel(),
        token_weights=elsewhere,
        full_layers=len(model.blocks) - windowed_layers,
        windowed_layers=windowed_layers,
        window_patches=(shape.window_side * shape.merge) ** 2,
    )
