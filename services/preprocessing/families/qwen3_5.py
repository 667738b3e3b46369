"""Qwen3.5, 3.6 and 3.8, dense and mixture of experts: as Qwen3-VL, without deepstack.

Source: transformers 5.24, which gives these models `Qwen3VLProcessor` and `Qwen3VLVideoProcessor`, and whose
`Qwen3_5Model.get_rope_index` is Qwen3-VL's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from framesieve.common.checkpoint import Checkpoint
from framesieve.services.preprocessing.families.qwen3_vl import DEFAULTS, Qwen3VL


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35(Qwen3VL):
    """The settings of one checkpoint."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Raises StartupError for settings that are not supported or contradict each other."""
        return cls.read(checkpoint, DEFAULTS)
