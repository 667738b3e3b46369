"""A language model as the runner sees it, and how its weights are read.

It knows no family: a family file says which class, which prefixes and what it refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor, nn

from common.checkpoint import Checkpoint
from common.errors import StartupError


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A text model of transformers with its output layer, on its device and ready to run.

    text: called with `inputs_embeds` [1, T, D], `position_ids` (3, 1, T) and what its attention wants besides.
    embed_tokens: ids to [.., D]; lm_head: [.., D] to [.., vocab_size].
    embed_levels: tensors that a media row carries beside its embedding.
    context_tokens: the longest sequence that the checkpoint was made for.
    """

    text: nn.Module
    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    layers: int
    kv_heads: int
    head_dim: int
    context_tokens: int
    embed_levels: int

    @property
    def hidden_size(self) -> int:
        return self.embed_tokens.embedding_dim

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype


def has_weights(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether any weight's name starts with `prefix`."""
    for path in checkpoint.weight_files:
        with safe_open(path, framework="pt") as file:
            if any(name.startswith(prefix) for name in file.keys()):  # noqa: SIM118  (not a dict)
                return True
    return False


def read_weights(checkpoint: Checkpoint, prefix: str, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, under the rest of their names."""
    weights: dict[str, Tensor] = {}
    for path in checkpoint.weight_files:
        with safe_open(path, framework="pt", device=str(device)) as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                if name.startswith(prefix):
                    weights[name.removeprefix(prefix)] = file.get_tensor(name).to(dtype)
    return weights


def fill(module: nn.Module, weights: dict[str, Tensor], prefix: str) -> None:
    """Puts `weights` in place of a module's own. Raises StartupError, naming them, if names or shapes differ."""
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    missing = [prefix + name for name in sorted(shapes.keys() - weights.keys())]
    unknown = [prefix + name for name in sorted(weights.keys() - shapes.keys())]
    if missing or unknown:
        raise StartupError(
            f"config.json and the weights disagree: missing weights {missing}, unknown weights {unknown}"
        )
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise StartupError(f"config.json wants {prefix + name} {list(shape)}, it is {list(weights[name].shape)}")
    module.load_state_dict(weights, assign=True)
