"""The check of a plan from preprocessing, before the encoder passes it on: that it is of this checkpoint and tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from framesieve.common.contract.errors import PeerContract
from framesieve.common.contract.plan import Grid, MediaPlan, Modality, PromptPlan
from framesieve.services.encoder.tower.patches import PatchShape


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """The tower's patches and levels, and the checkpoint's fingerprint.

    arrange: of a tower whose tokens are arranged; it raises ValueError for a plan that this tower cannot encode.
    """

    patches: PatchShape
    embed_levels: int
    fingerprint: bytes
    arrange: Callable[[MediaPlan], object] | None = None

    def check(self, plan: PromptPlan, media: int, brought: Mapping[int, Grid]) -> None:
        """Raises PeerContract unless the plan was made with this checkpoint, for a prompt with so many media.

        brought: the grids of the media that brought their embeddings, by media index.
        """
        if plan.fingerprint != self.fingerprint:
            raise PeerContract(
                f"preprocessing serves the checkpoint {plan.fingerprint.hex()}, this encoder {self.fingerprint.hex()}"
            )
        if plan.embed_levels != self.embed_levels:
            raise PeerContract(f"the plan has {plan.embed_levels} embed levels, the tower {self.embed_levels}")
        if len(plan.media) != media:
            raise PeerContract(f"the plan is for {len(plan.media)} media, the prompt has {media}")
        for index, item in enumerate(plan.media):
            if brought.get(index) != (item.grid if item.brings_embeds else None):
                raise PeerContract(
                    f"media {index} is planned with {item.frames} frames and the grid {item.grid}, the prompt brings "
                    f"{brought.get(index, 'pixels')}"
                )
            if not item.brings_embeds:
                self._check_frames(item)

    def _check_frames(self, item: MediaPlan) -> None:
        if self.arrange is not None:
            try:
                self.arrange(item)
            except ValueError as error:
                raise PeerContract(f"the frames of an {item.modality.value} do not make its grid: {error}") from error
            return
        if (item.grid.h, item.grid.w) != self.patches.grid(item.frame_height_px, item.frame_width_px):
            raise PeerContract(
                f"frames of {item.frame_height_px}×{item.frame_width_px} pixels do not make the grid {item.grid}"
            )
        slices = 1 if item.modality is Modality.IMAGE else -(-item.frames // self.patches.temporal_patch)
        if slices != item.grid.t or item.group_frames or (item.modality is Modality.IMAGE and item.frames != 1):
            raise PeerContract(f"{item.frames} frames of an {item.modality.value} do not make the grid {item.grid}")
