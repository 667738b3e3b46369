"""A vision tower: runs temporal slices of any sizes in one forward, and beside it a sound tower, if the model has one.

    slices, (F, H, W, 3) each ─▶ patches, (P, patch_values) ─▶ embeddings, (1 + levels, P / merge², D)
                                       layout of the packed patches     ─┘

The layout is computed on the host and sent with the patches, so the host never waits for the device.
It knows no family (a family's file makes the module), no requests and no batching.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridsieve.common.contract.plan import MediaPlan
from gridsieve.common.contract.retention import AFTER_TOWER, EVS, WHY_NOT_BEFORE
from gridsieve.services.compute.transfers import beside, taken_over, to_device
from gridsieve.services.encoder.tower.adapted import Adaptable, AdaptedForward
from gridsieve.services.encoder.tower.graph_buckets import PackingLimit
from gridsieve.services.encoder.tower.packing import Array, PackedLayout, Side, TowerShape, lay_out
from gridsieve.services.encoder.tower.patches import Frames, PatchShape, patchify, pixels_of, side_of
from gridsieve.services.encoder.tower.sound import Sound, SoundTower

# What a forward takes several of: all are frames, or all are sounds.
Slice: TypeAlias = Frames | Sound


@dataclass(frozen=True, slots=True)
class ModelForward:
    """One forward of a tower's model, without a graph.

    compute: patches (P, patch_values) and their layout, to (1 + embed_levels, P / merge², embed_dim).
    varlen: attention reads the ends of sequences from the device, so a captured graph of `compute` follows the layout.
        Otherwise attention reads them on the host, once per forward.
    layers: those of the model, of one class.
    """

    compute: Callable[[Tensor, PackedLayout[Tensor]], Tensor]
    shape: TowerShape
    device: torch.device
    varlen: bool
    layers: Sequence[nn.Module] = ()

    def __call__(self, patches: Tensor, sides: Sequence[Side]) -> Tensor:
        return self.compute(patches, self._send(lay_out(sides, self.shape)))

    def _send(self, layout: PackedLayout[Array]) -> PackedLayout[Tensor]:
        here = layout.map(torch.from_numpy)
        sent = here.map(partial(to_device, device=self.device))
        return sent if self.varlen else sent.with_ends_of(here)


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """Sizes from which the cost of a slice follows.

    hidden: width of a patch. patch_weights, token_weights: weights by which each patch, and each merged token, is
    multiplied once. full_layers: layers in which a patch attends to its whole slice, those of merged patches by their
    share of its pairs; in the windowed_layers it attends to at most window_patches.
    """

    hidden: int
    patch_weights: int
    token_weights: int
    full_layers: int | Fraction
    windowed_layers: int = 0
    window_patches: int = 0


def linear_weights(module: nn.Module) -> int:
    """The number of weights of its linear layers."""
    return sum(each.weight.numel() for each in module.modules() if isinstance(each, nn.Linear))


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How the tower's tokens of an item's slices become those of its grid.

    slice_tokens: tokens of each slice that are stored. first_tokens: those of the first one, where it has others; None:
    as many. of_slice: makes these of the tower's, (1 + levels, n, D). of_item: makes the grid's tokens of all stored
    ones. None: they are the same. times: the number of each frame's time, of towers that take them.
    """

    slice_tokens: int
    first_tokens: int | None = None
    of_slice: Callable[[Tensor], Tensor] | None = None
    of_item: Callable[[Tensor], Tensor] | None = None
    times: tuple[int, ...] = ()

    def tokens_before(self, index: int) -> int:
        """How many tokens the slices before this one have."""
        first = self.slice_tokens if self.first_tokens is None else self.first_tokens
        return first + (index - 1) * self.slice_tokens if index else 0


@dataclass(frozen=True, slots=True)
class Tower:
    """A vision tower on its device, ready to run.

    forward: patches (P, patch_values) and the sides of their slices, to (1 + embed_levels, P / merge²,
        embed_dim); level 0 is the embedding.
    pruning_methods: those of `gridsieve.common.contract.retention.METHODS` that a request may name.
    why_not_all: why it takes no others, for the error of a request that names one.
    usual_method: of a rate for which a request names no method.
    packing: the limit of one forward, if that is more than a number of tokens.
    features: width of what `forward` gives, where `arrange` makes embeddings of it; None: embed_dim.
    arrange: how an item's tokens are arranged; raises ValueError for a plan with other frames or another grid than this
        tower's. None: each slice of the grid has the tower's tokens of a slice.
    adaptable: the layers that adapters may change; None: none. adapters: digests of the loaded ones, by the names that
        requests give them. adapted: as `forward`, with each of those that change the tower, by digest; one at a time
        computes.
    sound: the model's sound tower; None: it hears nothing.
    """

    forward: Callable[[Tensor, Sequence[Side]], Tensor]
    patches: PatchShape
    embed_dim: int
    embed_levels: int
    dtype: torch.dtype
    device: torch.device
    sizes: TowerSizes
    pruning_methods: tuple[str, ...] = AFTER_TOWER
    why_not_all: str = WHY_NOT_BEFORE
    usual_method: str = EVS
    packing: PackingLimit | None = None
    features: int | None = None
    arrange: Callable[[MediaPlan], Arrangement] | None = None
    adaptable: Adaptable | None = None
    adapters: Mapping[str, bytes] = field(default_factory=dict)
    adapted: Mapping[bytes, AdaptedForward] = field(default_factory=dict)
    sound: SoundTower | None = None

    def arrangement(self, plan: MediaPlan) -> Arrangement:
        """How the tokens of an item are arranged."""
        if self.arrange is None or plan.brings_embeds:
            return Arrangement(plan.grid.slice_tokens)
        return self.arrange(plan)

    def embeds_bytes(self, tokens: int) -> int:
        """Bytes of the embeddings of `tokens` tokens, all levels."""
        return (1 + self.embed_levels) * tokens * self.embed_dim * self.dtype.itemsize

    def room_for(self, tokens: int) -> Tensor:
        """Uninitialised embeddings, (1 + embed_levels, tokens, embed_dim)."""
        return torch.empty(1 + self.embed_levels, tokens, self.embed_dim, dtype=self.dtype, device=self.device)

    def encode(self, slices: Sequence[Slice], adapter: bytes = b"") -> list[Tensor]:
        """Embeddings of each slice, (1 + embed_levels, h·w, embed_dim) on the tower's device, from one forward.

        slices: at least one, (F, H, W, 3) each, of any sizes, from any number of requests; on the host, or on the
        device, where the current stream may still be making them. Or sounds alone, whose deeper levels are zeros.
        adapter: digest of the adapter that all are encoded with; empty: none. It changes no sound.
        Attention never crosses slices, so neighbours change only rounding. On CUDA the result may still be in
        progress on the current stream.
        """
        sounds, frames = separated(slices)
        return self._of_sounds(sounds) if sounds else self._of_frames(frames, adapter)

    def _of_sounds(self, sounds: Sequence[Sound]) -> list[Tensor]:
        assert self.sound is not None
        embeds = self.sound([each.features for each in sounds])
        with torch.inference_mode():
            levels = F.pad(embeds[None], (0, 0, 0, 0, 0, self.embed_levels))
        return list(levels.split([self.sound.tokens_of(each.frames) for each in sounds], dim=1))

    def _of_frames(self, slices: Sequence[Frames], adapter: bytes) -> list[Tensor]:
        with torch.inference_mode():
            pixels = [pixels_of(each) for each in slices]
            # Frames that are on the device already may still be arriving, and the current stream waits for them.
            there = any(frames.device.type == "cuda" for frames in pixels)
            with nullcontext() if there else beside(self.device, "upload") as uploading:
                patches = torch.cat([patchify(to_device(frames, self.device), self.patches) for frames in pixels])
            forward = self.adapted[adapter] if adapter else self.forward
            embeds = forward(taken_over(patches, uploading), [side_of(each, self.patches) for each in slices])
            tokens = [self.patches.tokens(frames.shape) for frames in slices]
            return list(torch.split(embeds, tokens, dim=1))

    def cost(self, frames: Sequence[int]) -> int:
        """Multiplications in the forward of one slice. frames: its shape, (F, H, W, 3). Of each of its sequences:

            patches · patch_weights + tokens · token_weights
            + 2 · hidden · patches · (full_layers · patches + windowed_layers · min(window_patches, patches))

        Only attention over a whole sequence is quadratic. 2: each patch is multiplied with the keys that it sees, and
        the weights of these with their values.
        """
        sequences = len(self.patches.side(frames).times)
        tokens = self.patches.load(frames) // sequences
        sizes, patches = self.sizes, tokens * self.patches.merge**2
        seen = sizes.full_layers * patches + sizes.windowed_layers * min(sizes.window_patches, patches)
        once = patches * sizes.patch_weights + tokens * sizes.token_weights
        return int(sequences * (once + 2 * sizes.hidden * patches * seen))


def separated(slices: Sequence[Slice]) -> tuple[list[Sound], list[Frames]]:
    """The slices of one forward as what they are: all sounds, or all frames."""
    sounds = [each for each in slices if isinstance(each, Sound)]
    frames = [each for each in slices if not isinstance(each, Sound)]
    assert not (sounds and frames)
    return sounds, frames
