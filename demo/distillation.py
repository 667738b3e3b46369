"""Makes the tower of the demo's recurrent line from the demo model's tower.

Qwen3.5's tower has no windows, and layer norms and plain feed-forwards where Qwen2.5-VL's has RMS norms and gated ones.
It begins with all weights that both have, and learns from the states after each layer and the tokens of the demo's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.checkpoint import DEMO
from demo.lessons import COLUMNS, ROWS
from demo.model import embed

# The merger has other names.
_MERGER = {"norm": "ln_q", "linear_fc1": "mlp.0", "linear_fc2": "mlp.2"}


@torch.no_grad()
def begin(student: Any, teacher: Any) -> None:
    """Copies what the vision towers have in common; a student's other weights begin as they are, biases at 0."""
    known = dict(teacher.named_parameters())
    for name, parameter in student.named_parameters():
        part, _, rest = name.partition(".")
        own = ".".join([part, _MERGER[rest.rpartition(".")[0]], rest.rpartition(".")[2]]) if part == "merger" else name
        if own in known:
            parameter.copy_(known[own])
        elif name.endswith("bias") or "pos_embed" in name:
            parameter.zero_()


def loss_of(student: Any, teacher: Any, frames: Tensor) -> Tensor:
    """The squared errors, relative to the teacher's values: of its tokens, and on average of the states after a layer.

    student, teacher: models with a tower, whose grids have `ROWS` and `COLUMNS` of tokens. frames: as of `embed`.
    """
    with torch.no_grad():
        wanted, theirs = _with_states(teacher, frames)
    found, own = _with_states(student, frames)
    blocks = [_error(_by_window(one), other) for one, other in zip(own, theirs, strict=True)]
    return _error(found, wanted) + torch.stack(blocks).mean()


def _with_states(model: Any, frames: Tensor) -> tuple[Tensor, list[Tensor]]:
    states: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _, __, output: states.append(output)) for block in model.model.visual.blocks
    ]
    tokens = embed(model, frames)
    for hook in hooks:
        hook.remove()
    return tokens, states


def _error(found: Tensor, wanted: Tensor) -> Tensor:
    return F.mse_loss(found, wanted) / wanted.square().mean()


def _by_window(states: Tensor) -> Tensor:
    """States of patches, [slices · patches, D], in the order in which Qwen2.5-VL's tower has them."""
    side = DEMO.window_px // DEMO.patch_px // DEMO.merge
    tokens = torch.arange(ROWS * COLUMNS).view(ROWS // side, side, COLUMNS // side, side).transpose(1, 2).flatten()
    by_token = states.view(-1, ROWS * COLUMNS, DEMO.merge**2, states.shape[-1])
    return by_token[:, tokens].reshape(states.shape)
