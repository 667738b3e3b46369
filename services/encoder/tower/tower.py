"""A vision tower: its weights read by prefix from a checkpoint, and many temporal slices run in one forward.

It knows no family (a family's file makes the module), no requests and no batching: what it is given, it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from common.contract.retention import METHODS
from services.encoder.tower.cost import TowerSizes, slice_cost
from services.encoder.tower.forward import send
from services.encoder.tower.graph_buckets import Packing
from services.encoder.tower.packing import Side
from services.encoder.tower.patches import PatchShape, patchify

PATCH_EMBED = "patch_embed.proj."

_KEYS_NAMED = 5
_STORED = ("F64", "F32", "F16", "BF16")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Tower:
    """A vision tower on its device, ready to run.

    forward: patches uint8 (P, patch_values) and the sides of their slices, to (1 + embed_levels, P / merge²,
        embed_dim), level 0 being the embedding.
    sizes: what its work depends on.
    pruning_methods: those of `common.contract.retention.METHODS` that a request may name.
    packing: how many slices `encode` is best given at once, where more than their tokens counts.
    """

    forward: Callable[[Tensor, Sequence[Side]], Tensor]
    patches: PatchShape
    embed_dim: int
    embed_levels: int
    dtype: torch.dtype
    device: torch.device
    sizes: TowerSizes
    pruning_methods: tuple[str, ...] = METHODS
    packing: Packing | None = None

    def encode(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """Each slice's embeddings, (1 + embed_levels, h·w, embed_dim) on the tower's device, all from one forward.

        slices: at least one, uint8 (F, H, W, 3) each, of any sizes, from any number of requests.
        Attention never crosses slices, so neighbours change rounding alone. On CUDA they may still be on their way
        when this returns, in the order of the current stream.
        """
        with torch.inference_mode():
            patches = torch.cat([patchify(send(frames, self.device), self.patches) for frames in slices])
            sides = [self.patches.side(frames.shape) for frames in slices]
            embeds = self.forward(patches, sides)
            tokens = [rows * columns // self.patches.merge**2 for rows, columns in sides]
            return list(torch.split(embeds, tokens, dim=1))

    def cost(self, tokens: int) -> int:
        """Of a slice of so many tokens; see `cost.slice_cost`."""
        return slice_cost(self.sizes, tokens, tokens * self.patches.merge**2)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint. name: in its file; dtype: as safetensors calls it."""

    path: Path
    name: str
    dtype: str


def find_weights(checkpoint: Checkpoint, prefixes: Sequence[str]) -> dict[str, Stored]:
    """The tensors under the first of `prefixes` that the checkpoint uses, named without it."""
    found: dict[str, dict[str, Stored]] = {prefix: {} for prefix in prefixes}
    for path in checkpoint.weight_files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                prefix = next((each for each in prefixes if name.startswith(each)), None)
                if prefix is not None:
                    stored = Stored(path, name, file.get_slice(name).get_dtype())
                    found[prefix][name.removeprefix(prefix)] = stored
    return next((weights for weights in found.values() if weights), {})


def read_weights(stored: Mapping[str, Stored], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Straight to the device and into `dtype`, one after the other; those of the patch embedding as they are stored."""
    weights: dict[str, Tensor] = {}
    for path in {each.path for each in stored.values()}:
        with safe_open(path, framework="pt", device=str(device)) as file:
            for name, each in stored.items():
                if each.path == path:
                    tensor = file.get_tensor(each.name)
                    weights[name] = tensor if name.startswith(PATCH_EMBED) else tensor.to(dtype)
    return weights


def fill(module: nn.Module, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Puts `weights` into a module that was made on the meta device.

    Raises StartupError naming the tensors that are missing, that the module does not have, or of another shape.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    wrong = [
        f"{name} has the shape {list(weights[name].shape)}, the config says {list(shape)}"
        for name, shape in expected.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    complaints = {
        "lacks": sorted(expected.keys() - weights.keys()),
        "has unknown": sorted(weights.keys() - expected.keys()),
        "does not fit its config:": wrong,
    }
    found = [f"{what} {_some(names)}" for what, names in complaints.items() if names]
    if found:
        raise StartupError(f"the checkpoint's vision tower {'; it '.join(found)}")
    module.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, assign=True)


def choose_dtype(stored: Mapping[str, Stored], wanted: str) -> torch.dtype:
    """The dtype to run in: `wanted`, or for "auto" bfloat16 where every tensor is stored so, else float32.

    Raises StartupError for a tower that is quantised.
    """
    for each in stored.values():
        if each.dtype not in _STORED:
            raise StartupError(
                f"the checkpoint's vision tower is quantised, {each.name} to {each.dtype}; only the language model's "
                f"weights may be"
            )
    if wanted != "auto":
        return _DTYPES[wanted]
    return torch.bfloat16 if {each.dtype for each in stored.values()} == {"BF16"} else torch.float32


def _some(names: Sequence[str]) -> str:
    more = len(names) - _KEYS_NAMED
    return ", ".join(names[:_KEYS_NAMED]) + (f" and {more} more" if more > 0 else "")
