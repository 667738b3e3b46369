"""Conversations by their parts, what a planner makes of them, and the frames that it sends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

from numpy.typing import NDArray

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import Modality, PromptPlan
from gridsieve.services.preprocessing.conversation import Conversation, MediaRequest
from gridsieve.services.preprocessing.planner import PlannedPrompt, Planner
from gridsieve.services.preprocessing.prompt.turns import Turn
from gridsieve.services.preprocessing.video.pictures import PictureFrames
from gridsieve.services.preprocessing.video.sampling import FrameSampling

Part: TypeAlias = str | MediaRequest

ROUNDING = 2  # levels between two ways to resize; of tall pictures Pillow computes columns first, unlike torch


def image(data: bytes, **wish: Any) -> MediaRequest:
    return MediaRequest("image", Modality.IMAGE, data, FrameSampling(**wish))


def video(location: bytes | str, **wish: Any) -> MediaRequest:
    return MediaRequest("video", Modality.VIDEO, location, FrameSampling(**wish))


def pictures(files: Sequence[bytes], times_s: Sequence[float], by_time: bool = False, **wish: Any) -> MediaRequest:
    """A video of pictures."""
    frames = PictureFrames(tuple(accumulate(map(len, files))), tuple(times_s), by_time)
    return MediaRequest("video", Modality.VIDEO, b"".join(files), FrameSampling(**wish), frames)


def conversation(*messages: tuple[str, Sequence[Part]]) -> Conversation:
    """Of roles and what they say."""
    media = tuple(part for _, parts in messages for part in parts if isinstance(part, MediaRequest))
    turns = (
        Turn(role, tuple(part.modality if isinstance(part, MediaRequest) else part for part in parts))
        for role, parts in messages
    )
    return Conversation(tuple(turns), media)


def planned(planner: Planner | Path, *parts: Part) -> PlannedPrompt:
    """A user's turn. Its files stay open. planner: or the folder of its checkpoint."""
    made = Planner(Checkpoint(planner), None) if isinstance(planner, Path) else planner
    return made.plan(conversation(("user", parts)))


def plan_of(planner: Planner | Path, *parts: Part) -> PromptPlan:
    made = planned(planner, *parts)
    made.files.close()
    return made.plan


def sent_of(planner: Planner | Path, *parts: Part) -> tuple[PromptPlan, list[list[NDArray[Any]]]]:
    """And the frames of each item, (F, H, W, 3) by slice."""
    made = planned(planner, *parts)
    frames = [[each.pixels for each in media.slices()] for media in made.media]
    made.files.close()
    return made.plan, frames
