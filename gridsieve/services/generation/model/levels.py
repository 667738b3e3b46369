"""Deepstack: embeddings that are added to the media rows after each of the first layers.

Source: DeepStack, arXiv 2406.04334, as transformers' Qwen3VLTextModel has it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from gridsieve.services.generation.model.attention.running import RUNNING


def add_level(hidden: Tensor, rows: Tensor | None, level: Tensor) -> Tensor:
    """hidden: [1, T, D], of which the media rows, int64 [M], get `level` [M, D] added.

    rows: None in compiled forwards. There `level` is the number of one (`numbers`), and `RUNNING.levels` has rows and
    embeddings, if the step has media rows.
    """
    if rows is not None:
        return hidden.index_add(1, rows, level[None])
    added: Tensor = torch.ops.gridsieve.add_level(hidden, level)
    return added


@cache
def numbers(levels: int) -> list[Tensor]:
    """The numbers of the levels. The compiler takes integers of a list for sizes that may change."""
    return [torch.tensor(number) for number in range(levels)]


def _add_running(hidden: Tensor, number: Tensor) -> Tensor:
    if RUNNING.levels is None:
        return hidden.clone()  # an operator's result is none of its arguments
    rows, embeds = RUNNING.levels
    return hidden.index_add(1, rows, embeds[int(number)][None])


# An operator of its own is opaque to the compiler, so that one code serves forwards with and without media rows.
_library = torch.library.Library("gridsieve", "FRAGMENT")
_library.define("add_level(Tensor hidden, Tensor number) -> Tensor")
_library.impl("add_level", _add_running, "CPU")
_library.impl("add_level", lambda hidden, number: torch.empty_like(hidden), "Meta")
