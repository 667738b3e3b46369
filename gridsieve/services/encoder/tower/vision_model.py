"""Makes a vision tower from a checkpoint and transformers' class for it, or from a `TowerModel` that calls the layers.

    transformers' class    make_tower
    a TowerModel           on_meta ─▶ assemble: its weights, its attention, its patch embedding

It knows no family: a family's file names the classes, fills in a `TowerModel`, or extracts the embeddings from the
output of transformers' class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.fields import refusing
from gridsieve.services.compute.adapters import Features
from gridsieve.services.compute.packed_linear import pack_linears
from gridsieve.services.encoder.tower.adapted import Adaptable, linear_layers
from gridsieve.services.encoder.tower.attention import (
    VARLEN,
    Attend,
    Resampling,
    Wanted,
    attend_by_length,
    find_attention,
)
from gridsieve.services.encoder.tower.packing import PackedLayout, TowerShape
from gridsieve.services.encoder.tower.parallel.division import Share, divide
from gridsieve.services.encoder.tower.patches import FoldedPatchEmbed, Normalisation, PatchShape, read_normalisation
from gridsieve.services.encoder.tower.saturation import saturate
from gridsieve.services.encoder.tower.tower import ModelForward, Tower, TowerSizes, linear_weights
from gridsieve.services.encoder.tower.weights import Stored, choose_dtype, fill, find_parts, find_weights, read_weights

# Of Qwen3-VL's checkpoints, of Qwen2.5-VL's published ones, and of models that also speak.
PREFIXES = ("model.visual.", "visual.", "thinker.visual.")
PATCH_EMBED = "patch_embed.proj."
ALIGNED_WIDTH = 128
# Of the tower's modules in the whole model, to which adapters are trained.
_PEFT_PREFIX = "visual."
# Modules that multiply each of their inputs by all of their weights. The only convolution merges patches to tokens.
_PRODUCTS = (nn.Linear, nn.Conv2d)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a tower runs. dtype: a name, or "auto", see `choose_dtype`. share: of its layers; None: all of them."""

    dtype: str
    device: torch.device
    attention: Wanted = "auto"
    share: Share | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model that has its weights. weights: by name, those under `patch_embed` as stored, the others in `dtype`.

    attend: the attention of its layers.
    """

    model: Any
    weights: Mapping[str, Tensor]
    patch_embed: str
    dtype: torch.dtype
    device: torch.device
    attend: Attend

    def folded(self, normalisation: Normalisation) -> FoldedPatchEmbed:
        """The patch embedding of the weights under `patch_embed`, a convolution over pixels or over frames of them."""
        weight, bias = self.weights[f"{self.patch_embed}weight"], self.weights.get(f"{self.patch_embed}bias")
        return FoldedPatchEmbed(weight if weight.ndim == 5 else weight[:, :, None], bias, normalisation, self.dtype)

    def tower(
        self,
        layers: Iterable[nn.Module],
        *,
        patches: PatchShape,
        sizes: TowerSizes,
        embed_dim: int,
        compute: Callable[[Any, Tensor, PackedLayout[Tensor]], Tensor] | None = None,
        embed_levels: int = 0,
        linear: Mapping[str, Features] | None = None,
        prefix: str = "",
        **fields: Any,
    ) -> Tower:
        """The tower of the model, whose linear layers are packed from now on.

        compute: as `Adaptable.compute`; None: the model's own forward, as of `TowerModel`. linear, prefix: the layers
        that adapters may change, as `Adaptable.layers`; None: none. fields: others of `Tower`.
        """

        def call(model: Any, patches: Tensor, layout: PackedLayout[Tensor]) -> Tensor:
            tokens: Tensor = model(patches, layout, self.attend)
            return tokens[None]

        compute = compute or call
        pack_linears(self.model.eval().requires_grad_(False).to(self.device))
        varlen = self.attend is not attend_by_length
        return Tower(
            forward=ModelForward(partial(compute, self.model), patches.tower, self.device, varlen, tuple(layers)),
            patches=patches,
            embed_dim=embed_dim,
            embed_levels=embed_levels,
            dtype=self.dtype,
            device=self.device,
            sizes=sizes,
            adaptable=None if linear is None else Adaptable(self.model, compute, linear, prefix),
            **fields,
        )


class TowerModel(nn.Module):
    """A tower's model that calls transformers' layers itself. A family makes a subclass of it.

    Its modules have the names of the weights. Its forward makes tokens (T, D), or features (T, features), of patches
    (P, values), their layout and the attention. The patches of a token follow each other, row by row.
    vision: the config of its layers. parts: prefixes of the weights of its modules. layers_at: the name of the list of
    its layers with attention, all of one class. patch_embed: of patches, from `embed_with` on; patch_embedding: the
    prefix of the weights that it is made of. unread: prefixes of weights that are left out if the model lacks them.
    resampling: see `find_attention`. passing_on: subclasses of those of transformers' modules in the layers that drop
    the ends of sequences, which pass them on to the attention.
    """

    parts: tuple[str, ...]
    layers_at: str
    patch_embed: FoldedPatchEmbed
    patch_embedding: str
    unread: tuple[str, ...] = ()
    resampling: Resampling | None = None
    passing_on: tuple[type[nn.Module], ...] = ()

    def __init__(self, vision: Any) -> None:
        super().__init__()
        vision._attn_implementation = "sdpa"
        self.vision = vision

    @classmethod
    def on_meta(cls, *arguments: Any) -> Self:
        """The model without weights. Raises StartupError for a config that transformers' modules refuse."""
        with torch.device("meta"), refusing("config.json: vision_config"):
            return cls(*arguments)

    @property
    def layers(self) -> nn.ModuleList:
        layers = self.get_submodule(self.layers_at)
        assert isinstance(layers, nn.ModuleList)
        return layers

    def run_layers(self, states: Tensor, layout: PackedLayout[Tensor], attend: Attend) -> Tensor:
        """The output of the layers, (1, P, hidden)."""
        for layer in self.layers:
            states = layer(
                states, attention_mask=None, attend=attend, cu_seq_lens_q=layout.ends, max_length_q=layout.longest
            )
        return states

    def find(self, checkpoint: Checkpoint) -> Mapping[str, Stored]:
        """Its weights in a checkpoint, by their names in the model."""
        return find_parts(checkpoint, self.parts)

    def complete(self, weights: dict[str, Tensor], device: torch.device) -> None:
        """Changes the weights that were read to those of the model."""

    def embed_with(self, loaded: LoadedModel, normalisation: Normalisation) -> None:
        """Makes the embedding of patches, once the model has its weights, in place of the module that had them."""
        self.patch_embed = loaded.folded(normalisation)

    def sizes(self) -> TowerSizes:
        """Of layers that all attend to whole slices, beside which linear layers apply to merged tokens."""
        in_layers = linear_weights(self.layers)
        embedding = sum(each.weight.numel() for each in self.modules() if isinstance(each, FoldedPatchEmbed))
        others = linear_weights(self) - in_layers
        return TowerSizes(self.vision.hidden_size, in_layers + embedding, others, len(self.layers))


def assemble(
    checkpoint: Checkpoint,
    model: TowerModel,
    options: RunOptions,
    normalisation: Normalisation | None = None,
    **tower: Any,
) -> Tower:
    """The tower of a model that was made on the meta device. normalisation: None: that of the checkpoint's processors.
    tower: see `LoadedModel.tower`.

    Raises StartupError if the weights are not those of the model, or if the attention is unavailable.
    """
    kept, vision, device = model.state_dict().keys(), model.vision, options.device
    found = model.find(checkpoint)
    stored = {name: each for name, each in found.items() if name in kept or not name.startswith(model.unread)}
    dtype = choose_dtype(stored, options.dtype, device)
    weights = read_weights(stored, dtype, device, model.patch_embedding)
    model.complete(weights, device)
    fill(model, weights, dtype)
    heads = vision.num_attention_heads
    attend = find_attention(options.attention, device, dtype, heads, vision.hidden_size // heads, model.resampling)
    vision._attn_implementation_internal = VARLEN  # the private name: transformers' setter accepts only its own
    loaded = LoadedModel(model, weights, model.patch_embedding, dtype, device, attend)
    model.embed_with(loaded, normalisation or read_normalisation(checkpoint))
    if dtype == torch.float16:
        saturate(model)
    subclasses = {each.__base__: each for each in model.passing_on}
    for module in model.layers.modules():
        module.__class__ = subclasses.get(type(module), type(module))
    return loaded.tower(model.layers, sizes=model.sizes(), **tower)


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
    hidden: int,
    embed_dim: int,
    options: RunOptions,
    keywords: Callable[[PackedLayout[Tensor]], Mapping[str, Any]] = lambda layout: {},
    levels: Callable[[Any], Tensor] = lambda output: output.pooler_output[None],
    embed_levels: int = 0,
    windowed_layers: int = 0,
) -> Tower:
    """A tower that runs `model_class(config)` with the checkpoint's weights.

    rotary_class: of its `rotary_pos_emb`. keywords: what the model's forward takes of the layout beside positions and
    sequences. levels: converts its output to (1 + embed_levels, P / merge², embed_dim); by default it has the embedding
    alone. hidden: width of a patch inside the model.
    Raises StartupError if the checkpoint's tower is incomplete or cannot be divided, or the attention is unavailable.
    """
    with torch.device("meta"), refusing("config.json: vision_config"):
        model = model_class(config)
    device, share = options.device, options.share
    cuts = divide(model.blocks, share, "blocks.") if share else {}
    stored = find_weights(checkpoint, PREFIXES)
    runs_in = choose_dtype(stored, options.dtype, device)
    if share and runs_in == torch.float16:
        raise StartupError(
            f"--dtype float16 with --tower-tensor-parallel {share.ranks}: sums of several ranks overflow it, use "
            f"bfloat16 or float32"
        )
    weights = read_weights(stored, runs_in, device, PATCH_EMBED, cuts)
    fill(model, weights, runs_in)
    # Made again off the meta device: its frequencies are computed, not stored, and stay float32.
    model.rotary_pos_emb = rotary_class(config)
    heads = config.num_heads
    attend = find_attention(options.attention, device, runs_in, heads // (share.ranks if share else 1), hidden // heads)
    loaded = LoadedModel(model, weights, PATCH_EMBED, runs_in, device, attend)
    model.patch_embed = loaded.folded(read_normalisation(checkpoint))
    if runs_in == torch.float16:
        saturate(model)
    sizes, linear = _sizes(model, hidden, shape, windowed_layers), linear_layers(model, _PEFT_PREFIX)
    if device.type == "cuda":
        align_mlps(model)
    # The private name: transformers' setter accepts no names with "flash" except its own.
    config._attn_implementation_internal = VARLEN

    def compute(model: Any, patches: Tensor, layout: PackedLayout[Tensor]) -> Tensor:
        given = {
            "grid_thw": None,  # the model would compute the layout from it, on the device
            "position_ids": layout.positions,
            "cu_seqlens": layout.ends,
            "max_seqlen": layout.longest,
            "attend": attend,
        }
        return levels(model(patches, **{**given, **keywords(layout)}))

    return loaded.tower(
        model.blocks,
        patches=PatchShape(config.patch_size, shape, config.temporal_patch_size),
        sizes=sizes,
        embed_dim=embed_dim,
        compute=compute,
        embed_levels=embed_levels,
        linear=None if share else linear,
        prefix=_PEFT_PREFIX,
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
