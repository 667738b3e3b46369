"""What tests ask a planner: pictures and clips, looked at as wished, and the plan of a prompt of them."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image

from common.contract.plan import Modality
from services.preprocessing.planner import Conversation, MediaRequest, PlannedPrompt, Planner
from services.preprocessing.prompt.tokens import Turn
from services.preprocessing.video.sampling import FrameSampling


def picture(height: int, width: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "green").save(file, "PNG")
    return file.getvalue()


def video(data: bytes, **wish: Any) -> MediaRequest:
    return MediaRequest("video", Modality.VIDEO, data, FrameSampling(**wish))


def image(data: bytes, **wish: Any) -> MediaRequest:
    return MediaRequest("image", Modality.IMAGE, data, FrameSampling(**wish))


def planned(planner: Planner, *parts: str | MediaRequest) -> PlannedPrompt:
    media = tuple(part for part in parts if isinstance(part, MediaRequest))
    turn = Turn("user", tuple(part.modality if isinstance(part, MediaRequest) else part for part in parts))
    return planner.plan(Conversation((turn,), media))
