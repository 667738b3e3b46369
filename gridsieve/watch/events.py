"""What is told of cameras, in the envelope of CloudEvents 1.0, as JSON ("structured mode").

    gridsieve.answer           a question was answered
    gridsieve.camera.playing   a camera's first frame has come, or the first one after it was lost
    gridsieve.camera.lost      a camera, or the service that watches it, cannot be reached

Source: the CloudEvents specification, version 1.0.2, and its JSON format.
"""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from pydantic_core import from_json

from gridsieve.client.answer import FinishReason
from gridsieve.client.live_events import LiveFinished
from gridsieve.watch.cameras import Camera

ANSWER, PLAYING, LOST = "gridsieve.answer", "gridsieve.camera.playing", "gridsieve.camera.lost"
CONTENT_TYPE = "application/cloudevents+json"


@dataclass(frozen=True, slots=True)
class Event:
    """time: of an answer, when the frame was filmed that the question has seen last. snapshot: that frame, JPEG."""

    type: str
    camera: str
    time: datetime
    data: Mapping[str, Any]
    snapshot: bytes = field(default=b"", repr=False)
    id: str = field(default_factory=lambda: str(uuid4()))

    def json(self, snapshot: bool) -> bytes:
        """One line, in UTF-8. snapshot: with the picture, in base64."""
        picture = {"snapshot": base64.b64encode(self.snapshot).decode()} if snapshot and self.snapshot else {}
        envelope = {
            "specversion": "1.0",
            "id": self.id,
            "source": f"/gridsieve/watch/{quote(socket.gethostname())}",
            "type": self.type,
            "subject": self.camera,
            "time": _rfc3339(self.time),
            "datacontenttype": "application/json",
            "data": {"camera": self.camera, **self.data, **picture},
        }
        return json.dumps(envelope, ensure_ascii=False).encode()


def answered(camera: Camera, finished: LiveFinished) -> Event:
    """An answer to one of the camera's questions."""
    number = int(finished.ask_id.removeprefix("trigger-"))
    answer, usage, filmed = finished.answer, finished.usage, finished.filmed
    time = datetime.fromtimestamp(filmed.wall_time_s, UTC) if filmed else datetime.now(UTC)
    has_schema = camera.questions[number].sampling.get("json_schema") is not None
    data = {
        "question": finished.question,
        "answer": _value(answer.text) if has_schema and answer.reason is FinishReason.STOP else answer.text,
        "finish_reason": answer.reason.value,
        "seen_s": finished.seen_s,
        "wall_time": _rfc3339(time) if filmed else None,
        "wall_clock": filmed.wall_clock.value if filmed else None,
        "usage": {
            "prompt_tokens": answer.usage.prompt_tokens,
            "completion_tokens": answer.usage.completion_tokens,
            "media_tokens": usage.media_tokens,
            "media_tokens_full": usage.media_tokens_full,
            "frames": usage.frames,
            "dropped_frames": usage.dropped_frames,
        },
    }
    return Event(ANSWER, camera.name, time, data, filmed.snapshot if filmed else b"")


def playing(camera: Camera) -> Event:
    return Event(PLAYING, camera.name, datetime.now(UTC), {})


def lost(camera: Camera, reason: str) -> Event:
    return Event(LOST, camera.name, datetime.now(UTC), {"reason": reason})


def _value(text: str) -> Any:
    """The JSON that an answer is; its text where it is none, or has half of a surrogate pair, which UTF-8 has not."""
    try:
        return from_json(text)
    except ValueError:
        return text


def _rfc3339(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
