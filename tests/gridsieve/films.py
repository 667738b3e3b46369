"""Films of shots of one colour each, and an embedder whose vectors say what was embedded."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import grpc
import numpy as np
from av.video.stream import VideoStream

from gridsieve.client.client import GridsieveClient
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.limits import MAX_INLINE_BYTES
from gridsieve.common.contract.requests import check_prompt
from gridsieve.common.serving.status import DETAILS_KEY, status_details
from gridsieve.moments import FolderIndex, Progress
from gridsieve.v1 import generation_pb2, generation_pb2_grpc

FPS = 4
RED, GREEN, BLUE = (220, 20, 20), (20, 180, 20), (30, 30, 220)


def write_film(path: Path, shots: Sequence[tuple[tuple[int, int, int], float]], keyframe_every: int = 4) -> Path:
    """An mp4 of these colours, each for so many seconds. keyframe_every: so many frames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format="mp4") as container:
        options = {"g": str(keyframe_every), "sc_threshold": "0"}
        stream = container.add_stream("libx264", rate=Fraction(FPS), options=options)
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.thread_count = 1
        for colour, lasts_s in shots:
            picture = np.broadcast_to(np.array(colour, np.uint8), (48, 64, 3)).copy()
            for _ in range(round(lasts_s * FPS)):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def indexed(folder: Path, embedder: str, **arguments: Any) -> Progress:
    """`FolderIndex.update` of a folder, by the embedder at an address."""

    async def update() -> Progress:
        async with GridsieveClient(embedder) as client, FolderIndex(folder, client) as index:
            return await index.update(**arguments)

    with ThreadPoolExecutor(1) as thread:  # Playwright's event loop may run in this one
        return thread.submit(lambda: asyncio.run(update())).result()


class FakeEmbedder(generation_pb2_grpc.GenerationServiceServicer):
    """Vectors are points of a circle: of a film's part at its start in tenths of a radian, of a text at its number.

    A prompt has 3 tokens. fails_from: parts that begin at this second or later fail. takes_s: a call. max_inline_bytes:
    of a request's media.
    """

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.task = generation_pb2.TASK_EMBED
        self.name = "fake-embedder"
        self.fails_from: float | None = None
        self.takes_s = 0.0
        self.max_inline_bytes = MAX_INLINE_BYTES

    @property
    def videos(self) -> list[Any]:
        """The parts of films that were embedded."""
        parts = (each.prompt.messages[0].parts[0] for each in self.asked)
        return [each.video for each in parts if each.HasField("video")]

    async def ListModels(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield generation_pb2.ListModelsResponse(name=self.name, task=self.task)

    async def Embed(self, request: Any, context: Any) -> Any:
        part = request.prompt.messages[0].parts[0]
        try:
            check_prompt(request.prompt, self.max_inline_bytes)
        except InvalidRequest as error:
            details = status_details(error).SerializeToString()
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error), ((DETAILS_KEY, details),))
        angle = part.video.frame_sampling.start_s / 10 if part.HasField("video") else float(part.text)
        if self.fails_from is not None and part.HasField("video") and angle >= self.fails_from / 10:
            await context.abort(grpc.StatusCode.INTERNAL, "the embedder fails")
        self.asked.append(request)
        await asyncio.sleep(self.takes_s)
        usage = generation_pb2.Usage(prompt_tokens_full=3, prompt_tokens=3)
        return generation_pb2.EmbedResponse(embedding=[math.cos(angle), math.sin(angle)], request_id="r1", usage=usage)
