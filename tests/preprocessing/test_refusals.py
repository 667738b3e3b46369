"""Wrong requests and bad media are refused with a status and a reason, and the next request is served."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from framesieve.v1 import prompt_pb2
from framesieve.v1.preprocessing_pb2 import PreprocessRequest
from tests.preprocessing.media_server import ok
from tests.preprocessing.media_server import serving as web_server
from tests.preprocessing.preprocessing_media import clip, sound, without_packets
from tests.preprocessing.service import (
    EVERYTHING,
    Queues,
    by_url,
    fetching_from,
    plan_of,
    prompt_of,
    refused,
    select,
    sent,
    text,
    video,
)

# One event loop for the module, because the workers belong to it.
pytestmark = pytest.mark.asyncio(loop_scope="module")


CLIP = clip(4)


def image(**fields: Any) -> prompt_pb2.Part:
    return prompt_pb2.Part(image=prompt_pb2.Media(**fields))


def by(**fields: Any) -> prompt_pb2.Part:
    """A video with these fields."""
    return prompt_pb2.Part(video=prompt_pb2.Media(**fields))


NO_PROMPT = "first request of a stream must be a prompt"
WITHOUT_ROLE = prompt_pb2.Prompt(messages=[prompt_pb2.Message(parts=[text("hi")])])
NO_URL = image(url="example.org/x.png")
INLINE = [by(url="data:," + "x" * 9 * 2**20), video(bytes(8 * 2**20))]


@pytest.mark.parametrize(
    ("requests", "named"),
    [
        ([PreprocessRequest()], NO_PROMPT),
        ([select(0)], NO_PROMPT),
        ([], NO_PROMPT),
        ([prompt_of(video(CLIP)), prompt_of(video(CLIP))], "must be a select"),
        ([prompt_of(video(CLIP)), select(1)], "below the plan's 1 media, got 1"),
        ([prompt_of(video(CLIP)), select(-1)], "below the plan's 1 media, got -1"),
        ([prompt_of(video(CLIP)), select(0), select(0)], "0 was selected before"),
        ([PreprocessRequest(prompt=prompt_pb2.Prompt())], "prompt.messages must hold at least one message"),
        ([prompt_of()], r"prompt.messages\[0\].parts must hold at least one part"),
        ([prompt_of(text(""), text(""))], "no media and only empty text"),
        ([prompt_of(prompt_pb2.Part())], r"prompt.messages\[0\].parts\[0\] must hold text, image or video"),
        ([PreprocessRequest(prompt=WITHOUT_ROLE)], r"messages\[0\].role must be system, user or assistant, got 0"),
        ([prompt_of(text("x"), by())], r"parts\[1\].video must hold data, url, path or embeds"),
        (
            [prompt_of(text("x"), NO_URL)],
            r"^prompt.messages\[0\].parts\[1\].image.url must start with http:// or https://",
        ),
        ([prompt_of(by(url="DATA:;base64,a"))], r"\[0\].parts\[0\].video.url must be base64 after its comma"),
        ([prompt_of(*[by(url="http://127.0.0.1/")] * 33)], "33 media by URL, at most 32 are allowed"),
        ([prompt_of(*INLINE)], "17825792 bytes of inline media, at most 16777216 are allowed"),
        ([prompt_of(video(CLIP, fps=0.0))], r"video.frame_sampling.fps must be above 0 and at most 1000, got 0.0"),
        ([prompt_of(image(data=b"x", frame_sampling={"fps": 2.0}))], "image.frame_sampling.fps is for videos"),
    ],
)
async def test_a_wrong_request_is_refused_with_its_field(
    stub: Any, requests: list[PreprocessRequest], named: str
) -> None:
    code, reason, message = await refused(await sent(stub, *requests))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert re.search(named, message)


@pytest.mark.parametrize(
    ("media", "code", "reason"),
    [
        ({"data": b"garbage" * 99}, "INVALID_ARGUMENT", "MEDIA_REJECTED"),
        ({"data": sound()}, "INVALID_ARGUMENT", "MEDIA_REJECTED"),
        ({"data": b""}, "INVALID_ARGUMENT", "MEDIA_REJECTED"),
        ({"url": "data:,"}, "INVALID_ARGUMENT", "MEDIA_REJECTED"),
        ({"url": "http://127.0.0.1/clip.mp4"}, "PERMISSION_DENIED", "MEDIA_FORBIDDEN"),
        ({"url": "file:///etc/passwd"}, "PERMISSION_DENIED", "MEDIA_FORBIDDEN"),
        ({"path": "nothing.mp4"}, "INVALID_ARGUMENT", "MEDIA_REJECTED"),
        ({"path": "../socket"}, "PERMISSION_DENIED", "MEDIA_FORBIDDEN"),
        ({"path": "/etc/passwd"}, "PERMISSION_DENIED", "MEDIA_FORBIDDEN"),
        (
            {"data": without_packets(clip(30, container="matroska", codec="mjpeg"), range(4, 30))},
            "INVALID_ARGUMENT",
            "MEDIA_DAMAGED",
        ),
    ],
)
async def test_bad_media_are_refused_with_status_and_reason(
    stub: Any, media: dict[str, Any], code: str, reason: str
) -> None:
    call = await sent(stub, prompt_of(by(**media)))
    if reason == "MEDIA_DAMAGED":
        await plan_of(call)
        await call.write(EVERYTHING)
    assert (await refused(call))[:2] == (grpc.StatusCode[code], reason)


async def test_a_fetched_file_that_is_no_media_is_refused_with_its_field(
    tiny_checkpoint: Path, tmp_path: Path, queues: Queues
) -> None:
    async with (
        web_server(ok(b"garbage" * 99)) as server,
        fetching_from(server, tiny_checkpoint, tmp_path, queues) as stub,
    ):
        code, reason, message = await refused(await sent(stub, prompt_of(video(CLIP), by_url(server))))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MEDIA_REJECTED")
    assert message.startswith("prompt.messages[0].parts[1].video")
