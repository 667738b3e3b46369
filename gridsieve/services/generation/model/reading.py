"""Models that read prompts and generate nothing: the last state after the final norm is a vector, or makes a score."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gridsieve.common.checkpoint import Task


@dataclass(frozen=True, slots=True)
class Reading:
    """The prompts that a family's embedders, or its rerankers, were trained with.

    instruction: where a request has none. system: the system message of a reranker, whose instruction is in the user's
    turn; of an embedder it is the instruction. yes, no: the tokens whose logits a reranker compares.
    """

    task: Task
    instruction: str
    system: str = ""
    yes: str = "yes"
    no: str = "no"


class YesOverNo(nn.Module):
    """An output layer of one value: the logit of "yes" minus that of "no", whose weights [D] the output layer has.

    It is computed in float32: in bfloat16 such logits would be 0.06 apart.
    """

    def __init__(self, yes: Tensor, no: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter((yes.float() - no.float())[None], requires_grad=False)

    def forward(self, states: Tensor) -> Tensor:
        """states: [S, D], any float dtype. Returns float32 [S, 1]."""
        return nn.functional.linear(states.to(torch.float32), self.weight)
