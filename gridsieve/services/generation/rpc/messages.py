"""What a call's messages say of its prompt, and of the model."""

from __future__ import annotations

from collections.abc import Sequence

from gridsieve.common.contract.plan import Int32Array, Modality, PromptPlan
from gridsieve.common.contract.retention import AUTO_THRESHOLD, BEFORE_TOWER, EVS, ItemPruning
from gridsieve.common.contract.wire import grid_message, modality_message
from gridsieve.v1 import generation_pb2


def usage_message(plan: PromptPlan, prunings: Sequence[ItemPruning], num_kept: Sequence[int]) -> generation_pb2.Usage:
    """Usage of a prompt before generation. prunings, num_kept: one for each media item."""
    full = sum(item.grid.tokens for item in plan.media)
    usage = generation_pb2.Usage(
        prompt_tokens_full=plan.tokens, prompt_tokens=plan.tokens - full + sum(num_kept), completion_tokens=0
    )
    for item, pruning, kept in zip(plan.media, prunings, num_kept, strict=True):
        usage.media.add(
            modality=modality_message(item.modality),
            grid=grid_message(item.grid),
            num_kept=kept,
            missing_frames=item.file.missing_frames,
            dropped_frames=item.file.dropped_frames,
            sampling_mode=item.sampling_mode,
            sampled_frames=item.sampled_frames,
            heard_s=item.heard_s,
            # EVS ranks slice 0 first, so if exactly one slice's tokens are kept, they are those of slice 0.
            first_slice_only=item.modality is Modality.VIDEO
            and pruning.method == EVS
            and kept == item.grid.slice_tokens < item.grid.tokens,
        )
    return usage


def note_item(usage: generation_pb2.Usage, index: int, kept: Int32Array | None, repaired_frames: int) -> None:
    """Adds what is known of an item once it is encoded. kept: int32 [K]; None: all of its tokens."""
    item = usage.media[index]
    count = item.grid.t * item.grid.h * item.grid.w if kept is None else kept.size
    usage.prompt_tokens -= item.num_kept - count
    item.num_kept, item.repaired_frames = count, repaired_frames


def method_message(name: str) -> generation_pb2.PruningMethod:
    before_tower = name in BEFORE_TOWER
    threshold = AUTO_THRESHOLD if before_tower else None
    return generation_pb2.PruningMethod(name=name, before_tower=before_tower, suggested_threshold=threshold)
