"""Turns frames into the patches that a vision tower reads; normalisation is folded into the tower's first weights.

    frames  (F, H, W, 3)                                 F above temporal_patch: patches of one part after another
    patches (h·w·merge², 3·temporal_patch·patch²)      rows by merged token, then within it; values (c, t, y, x)

A patch embedding W of normalised values is, for uint8 values u, W·(u·rescale − mean)/std, which equals
W'·(u − 128) + b' (without centring, the bfloat16 error would be a fifth larger). So frames stay uint8 until the
tower's first product. Frames of families whose processors do not round after resizing are float32, on the same scale.
It knows no family.
Source: patchify and rescale_and_normalize of transformers' Qwen2VLVideoProcessor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.fields import Fields
from gridsieve.services.encoder.tower.packing import UNTIMED, Side, TowerShape, size_of

CHANNELS = 3
_CENTRE = 128


@dataclass(frozen=True, slots=True)
class PatchShape:
    """patch_px: side of a square patch. tower: from which the layouts of patches follow. temporal_patch: frames of a
    patch. frame_dtype: of frames and patches. The pixels of a frame beyond `tower.fixed` sides are left out.
    """

    patch_px: int
    tower: TowerShape
    temporal_patch: int = 1
    frame_dtype: torch.dtype = torch.uint8

    @property
    def merge(self) -> int:
        """Patches per side of a token."""
        return self.tower.merge

    @property
    def token_px(self) -> int:
        return self.patch_px * self.merge

    @property
    def patch_values(self) -> int:
        return CHANNELS * self.temporal_patch * self.patch_px**2

    def side(self, frames: Sequence[int]) -> Side:
        """Rows and columns of patches in a slice, without times. frames: its shape, (F, H, W, 3).

        A slice of fewer frames than a patch has is a picture.
        """
        times = (UNTIMED,) * -(-frames[0] // self.temporal_patch)
        still = frames[0] < self.temporal_patch
        return Side(frames[1] // self.patch_px, frames[2] // self.patch_px, times, still=still)

    def tokens(self, frames: Sequence[int]) -> int:
        """Tokens of one temporal slice. frames: its shape, (F, H, W, 3)."""
        return self.tower.tokens([self.side(frames)])

    def load(self, frames: Sequence[int]) -> int:
        """Merged patches of one temporal slice, which limit a forward. frames: its shape, (F, H, W, 3)."""
        return size_of(self.side(frames), self.tower).tokens

    def grid(self, height_px: int, width_px: int) -> tuple[int, int] | None:
        """Rows and columns of the tokens of a frame; one row where they are not those of patches. None: of no frame."""
        side, fixed = self.side((1, height_px, width_px)), self.tower.fixed
        if fixed:
            if side[:2] != fixed[:2]:
                return None
        elif height_px % self.token_px or width_px % self.token_px:
            return None
        rows, columns = height_px // self.token_px, width_px // self.token_px
        tokens = self.tokens((1, height_px, width_px))
        return (rows, columns) if rows * columns == tokens else (1, tokens)


@dataclass(frozen=True, slots=True)
class Normalisation:
    """normalised = (value · rescale − mean) / std, per channel, for values 0 to 255."""

    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


def read_normalisation(checkpoint: Checkpoint, video: Fields | None = None) -> Normalisation:
    """The normalisation of the checkpoint's processors. video: settings of videos, where they are not the checkpoint's.

    Raises StartupError if there is no processor config, or if images and videos are normalised differently.
    """
    image = checkpoint.processor("image")
    video = video or checkpoint.processor("video") or image
    if not video:
        raise StartupError(
            f"{checkpoint.folder} has neither preprocessor_config.json nor processor_config.json: how pixels are "
            f"normalised is unknown"
        )
    of_video, of_image = _normalisation(video), _normalisation(image or video)
    if of_video != of_image:
        raise StartupError(f"images and videos must be normalised alike, got {of_image} and {of_video}")
    return of_video


def _normalisation(config: Fields) -> Normalisation:
    rescale = config.number("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0
    if not config.get("do_normalize", True):
        return Normalisation(rescale, (0.0,) * CHANNELS, (1.0,) * CHANNELS)
    # MiniCPM-V's name them norm_…
    prefix = "norm" if "norm_mean" in config and "image_mean" not in config else "image"
    mean, std = (config.numbers(f"{prefix}_{name}", CHANNELS) for name in ("mean", "std"))
    if min(std) <= 0:
        raise config.refusal(f"{prefix}_std", "above 0")
    return Normalisation(rescale, mean, std)


@dataclass(frozen=True, slots=True, eq=False)
class TimedFrames:
    """A slice whose frames have times. frames: (F, H, W, 3). times: the number of each one's time."""

    frames: Tensor
    times: tuple[int, ...]

    @property
    def shape(self) -> Sequence[int]:
        return self.frames.shape


@dataclass(frozen=True, slots=True, eq=False)
class KeptFrames:
    """A slice of which only some tokens are there, one below the other. frames: (F, k · token_px, token_px, 3).

    grid: rows and columns of all its tokens. kept: which are there, k of them, increasing.
    """

    frames: Tensor
    grid: tuple[int, int]
    kept: tuple[int, ...]

    @property
    def shape(self) -> Sequence[int]:
        return self.frames.shape


# (F, H, W, 3), with the times of its frames where a tower takes them, or with the tokens that are there.
Frames: TypeAlias = Tensor | TimedFrames | KeptFrames


def side_of(frames: Frames, shape: PatchShape) -> Side:
    """The side of a slice, in patches."""
    match frames:
        case TimedFrames():
            return shape.side(frames.shape)._replace(times=frames.times)
        case KeptFrames(grid=(rows, columns)):
            return Side(rows * shape.merge, columns * shape.merge, kept=frames.kept)
    return shape.side(frames.shape)


def pixels_of(frames: Frames) -> Tensor:
    """(F, H, W, 3)."""
    return frames if isinstance(frames, Tensor) else frames.frames


def whole(frames: Tensor, shape: PatchShape) -> Tensor:
    """Frames (F, H, W, 3), of which the last is repeated to a whole temporal patch."""
    short = -len(frames) % shape.temporal_patch
    return torch.cat([frames, frames[-1:].expand(short, -1, -1, -1)]) if short else frames


def patchify(frames: Tensor, shape: PatchShape) -> Tensor:
    """One temporal slice as patches, in the tower's order.

    frames: (F, H, W, 3), made whole here; rows and columns after the last whole token are left out.
    Returns (F / temporal_patch · (lead + H·W / patch²), patch_values).
    """
    frames = whole(frames, shape)
    rows, columns = frames.shape[1] // shape.token_px, frames.shape[2] // shape.token_px
    frames = frames[:, : rows * shape.token_px, : columns * shape.token_px]
    # (f, t, h, merge, y, w, merge, x, c) to (f, h, w, merge, merge, c, t, y, x)
    cut = frames.reshape(
        -1, shape.temporal_patch, rows, shape.merge, shape.patch_px, columns, shape.merge, shape.patch_px, CHANNELS
    )
    patches = cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).flatten(1, 4).flatten(2)
    if lead := shape.tower.lead:
        patches = torch.cat([patches.new_zeros(len(patches), lead, shape.patch_values), patches], dim=1)
    return patches.reshape(-1, shape.patch_values)


class FoldedPatchEmbed(nn.Module):
    """A patch embedding with normalisation folded in: patches (P, patch_values) to (P, hidden)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, normalisation: Normalisation, dtype: torch.dtype) -> None:
        """weight: (hidden, 3, temporal_patch, patch, patch) of the convolution. bias: (hidden,) or None."""
        super().__init__()
        weight = weight.double()  # folding in float64 adds no rounding error
        mean, std = (
            torch.tensor(values, dtype=torch.float64, device=weight.device).view(1, CHANNELS, 1, 1, 1)
            for values in (normalisation.mean, normalisation.std)
        )
        folded_bias = (weight * (_CENTRE * normalisation.rescale - mean) / std).sum((1, 2, 3, 4))
        if bias is not None:
            folded_bias += bias
        self.weight = nn.Parameter((weight * (normalisation.rescale / std)).flatten(1).to(dtype), requires_grad=False)
        self.bias = nn.Parameter(folded_bias.to(dtype), requires_grad=False)

    def forward(self, patches: Tensor) -> Tensor:
        # uint8 is exact in any dtype; float32 is rounded once it is centred.
        centred = patches.to(torch.promote_types(patches.dtype, self.weight.dtype)) - _CENTRE
        return F.linear(centred.to(self.weight.dtype), self.weight, self.bias)
