"""A sound tower: runs the log-mel features of sounds of any lengths in one forward.

    sounds, (mels, frames) each ─▶ rows of the layers, (P, hidden) ─▶ embeddings, (tokens, D)

A sound has a row of its layers where a picture has a patch, and as much is computed of both, so a forward may hold as
many. It knows no family (a family's file makes `compute`), no requests and no batching.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gridsieve.services.compute.transfers import to_device

# No sound has so many frames.
_FRAMES = 2**30


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """A sound, for the batcher what a slice is of a video. features: log-mel, (mels, frames), any float dtype."""

    features: Tensor

    @property
    def frames(self) -> int:
        return self.features.shape[1]


@dataclass(frozen=True, slots=True)
class SoundTower:
    """A sound tower on its device, ready to run.

    compute: features on the device, (mels, frames) each, to the embeddings of all, (tokens, D).
    rows_of, tokens_of: of the frames of a sound, how many rows the layers compute, and how many tokens these become.
    mels: values of a frame.
    """

    compute: Callable[[Sequence[Tensor]], Tensor]
    rows_of: Callable[[int], int]
    tokens_of: Callable[[int], int]
    mels: int
    device: torch.device

    def __call__(self, features: Sequence[Tensor]) -> Tensor:
        """Embeddings of all sounds, (sum of their tokens, D) on the tower's device, from one forward.

        features: of at least one sound, (mels, frames) each, of any lengths, in any float dtype.
        Neither convolutions nor attention cross sounds, so neighbours change only rounding. On CUDA the result may
        still be in progress on the current stream.
        """
        with torch.inference_mode():
            return self.compute([to_device(each, self.device) for each in features])

    def longest_of(self, rows: int) -> int:
        """Frames of the longest sound of up to so many rows, at least 1."""
        return max(1, bisect_right(range(_FRAMES), rows, key=self.rows_of) - 1)
