"""The check of a plan from preprocessing, before the encoder passes it on: that it is of this checkpoint and tower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gridsieve.common.contract.errors import PeerContract
from gridsieve.common.contract.plan import MediaPlan, Modality, PromptPlan
from gridsieve.common.contract.received import check_plan
from gridsieve.services.encoder.tower.patches import PatchShape
from gridsieve.services.encoder.tower.sound import SoundTower
from gridsieve.v1 import prompt_pb2


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """What a plan must agree with: the tower's patches and levels, and the checkpoint's fingerprint.

    arrange: of a tower whose tokens are arranged; it raises ValueError for a plan that it cannot be of. sound: the
    model's sound tower; None: it hears nothing.
    """

    patches: PatchShape
    embed_levels: int
    fingerprint: bytes
    arrange: Callable[[MediaPlan], object] | None = None
    sound: SoundTower | None = None

    def check(self, plan: PromptPlan, prompt: prompt_pb2.Prompt) -> None:
        """Raises PeerContract unless the plan is one of this prompt, made with this checkpoint for this tower."""
        check_plan(plan, prompt, self.fingerprint, self.embed_levels)
        for item in plan.media:
            if not item.brings_embeds:
                self.check_frames(item)

    def check_frames(self, item: MediaPlan) -> None:
        """Raises PeerContract unless the tower makes the item's grid of its frames."""
        if item.modality is Modality.AUDIO:
            self._check_sound(item)
            return
        if getattr(torch, item.frames.dtype.label) is not self.patches.frame_dtype:
            raise PeerContract(f"frames of {item.frames.dtype.label} are sent to a tower of {self.patches.frame_dtype}")
        if self.arrange is not None:
            try:
                self.arrange(item)
            except ValueError as error:
                raise PeerContract(f"the frames of an {item.modality.value} do not make its grid: {error}") from error
            return
        if (item.grid.h, item.grid.w) != self.patches.grid(*item.frames.size_px):
            height, width = item.frames.size_px
            raise PeerContract(f"frames of {height}×{width} pixels do not make the grid {item.grid}")
        frames, is_image = item.frames, item.modality is Modality.IMAGE
        slices = 1 if is_image else -(-frames.count // self.patches.temporal_patch)
        if slices != item.grid.t or frames.group_frames or frames.tile_columns or (is_image and frames.count != 1):
            raise PeerContract(f"{frames.count} frames of an {item.modality.value} do not make the grid {item.grid}")

    def _check_sound(self, item: MediaPlan) -> None:
        mels, moments = item.frames.size_px
        if self.sound is None or (self.sound.mels, self.sound.tokens_of(moments)) != (mels, item.grid.tokens):
            raise PeerContract(f"{moments} moments of {mels} mel bands do not make the grid {item.grid} of a sound")
