"""Conversations by their parts, what a planner makes of them, and the frames that it sends.

Beside them: checkpoints with other settings, and what transformers' tokenizer and Pillow make of a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoTokenizer

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import Grid, Modality, PromptPlan
from gridsieve.services.preprocessing.conversation import Conversation, MediaRequest
from gridsieve.services.preprocessing.planner import PlannedPrompt, Planner
from gridsieve.services.preprocessing.prompt.embeds import Embeds
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


def embedded(modality: Modality, grid: Grid, tile_columns: int = 0) -> MediaRequest:
    """Embeddings, those of a video a second apart."""
    step = Fraction(1) if modality is Modality.VIDEO else None
    embeds = Embeds(modality, grid, 0, bytes(32), step, (), tile_columns)
    return MediaRequest("media", modality, embeds, FrameSampling())


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


def with_settings(folder: Path, to: Path, **files: dict[str, Any] | None) -> Path:
    """A copy of a checkpoint, of links, some of whose JSON files have other fields; None leaves a file out."""
    to.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if file.stem not in files:
            (to / file.name).symlink_to(file)
    for name, changes in files.items():
        path = folder / f"{name}.json"
        held = json.loads(path.read_text()) if path.exists() else {}
        if changes is not None:
            (to / path.name).write_text(json.dumps(held | changes))
    return to


@cache
def tokenizer_of(folder: Path) -> Any:
    """transformers' tokenizer of a checkpoint."""
    return AutoTokenizer.from_pretrained(folder)


def ids_of(folder: Path, question: str) -> list[int]:
    """transformers' ids of a user's question, whose media are expanded, in ChatML."""
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    ids: list[int] = tokenizer_of(folder)(text, add_special_tokens=False)["input_ids"]
    return ids


def rgb(data: bytes) -> NDArray[np.uint8]:
    """A picture by Pillow, uint8 [H, W, 3]."""
    return np.array(Image.open(BytesIO(data)).convert("RGB"))
