"""Language models whose numbers for a row have the same bits whatever is computed together, and in whichever chunks.

    products, norms, routers   a step is divided into forwards of a fixed number of rows (`request/division.py`): the
                               order of sums follows from the number of rows, and not from a row's place among them
    output layer, experts      likewise, in numbers of their own (`in_fixed_sizes`)
    attention                  each row attends to parts of its own sequence that begin at the first token
                               (`attention/fixed_sdpa.py`, `attention/flash_infer.py`)
    recurrent states           each token by itself (`fixed_states.py`)

Heads that draft are not changed: their tokens cannot change an answer. Whether it holds on a machine, and in how many
sizes, is tried at the start (`startup/same_bits.py`).
Source: batch invariance, "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gridsieve.services.generation.model.experts import FIXED_EXPERTS
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.separate_experts import SeparateExperts

# Rows of a forward. The first number is used wherever rows have the same bits at all of its places, the others where
# their bits are also the same as in the first. On CUDA as many as take hardly longer than one, which reads all weights.
CPU_ROWS, CUDA_ROWS = (64, 1, 4, 16, 256), (128,)


def made_deterministic(model: LanguageModel) -> LanguageModel:
    """The model, whose adapters and experts compute in fixed numbers of rows from now on."""
    model.adapters.of_all_rows = True
    config: Any = model.text.config
    config._experts_implementation = FIXED_EXPERTS
    for module in model.text.modules():
        if isinstance(module, SeparateExperts):
            module.fixed = True
    return replace(model, deterministic=True)


def row_sizes(model: LanguageModel) -> tuple[int, ...]:
    """How many rows a forward of a deterministic model may have; empty for other models."""
    if not model.deterministic:
        return ()
    return CUDA_ROWS if model.device.type == "cuda" else CPU_ROWS
