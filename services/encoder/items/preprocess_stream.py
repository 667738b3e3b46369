"""The preprocessing service's client: one call of Preprocess, checked against the contract as it is read.

It turns messages into a plan and whole temporal slices; whatever the plan did not announce is PeerContract.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

import grpc
from framesieve.v1 import preprocessing_pb2_grpc, prompt_pb2
from framesieve.v1.preprocessing_pb2 import FramesChunk, PreprocessRequest, PreprocessResponse

from common.channels import end_writing, read_from, write_to
from common.contract.errors import PeerContract
from common.contract.plan import Grid, MediaPlan, Modality, PromptPlan
from common.contract.tensors import DType, TensorBuffer
from common.contract.wire import PlanReceiver, add_chunk, buffer_for, modalities_of
from common.contract.wire import from_ago_s
from services.encoder.items.encoding import FrameSlice
from services.encoder.tower.patches import PatchShape

STAGE = "preprocessing"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a plan must agree with: the tower's patches and levels, and the checkpoint's fingerprint."""

    patches: PatchShape
    embed_levels: int
    fingerprint: bytes

    def check(self, plan: PromptPlan, modalities: Sequence[Modality], brought: Mapping[int, Grid]) -> None:
        """Raises PeerContract unless the plan was made with this checkpoint, for a prompt with these media.

        brought: the grids of those media that brought their embeddings, by index.
        """
        if plan.fingerprint != self.fingerprint:
            raise PeerContract(
                f"preprocessing serves the checkpoint {plan.fingerprint.hex()}, this encoder {self.fingerprint.hex()}"
            )
        if plan.embed_levels != self.embed_levels:
            raise PeerContract(f"the plan has {plan.embed_levels} embed levels, the tower {self.embed_levels}")
        planned = [item.modality for item in plan.media]
        if planned != list(modalities):
            raise PeerContract(f"the plan is for {planned}, the prompt has {list(modalities)}")
        for index, item in enumerate(plan.media):
            if brought.get(index) != (item.grid if item.brings_embeds else None):
                raise PeerContract(
                    f"media {index} is planned with {item.frames} frames and the grid {item.grid}, the prompt brings "
                    f"{brought.get(index, 'pixels')}"
                )
            if not item.brings_embeds:
                self._check_frames(item)

    def _check_frames(self, item: MediaPlan) -> None:
        size = (item.grid.h * self.patches.token_px, item.grid.w * self.patches.token_px)
        if size != (item.frame_height_px, item.frame_width_px):
            raise PeerContract(
                f"frames of {item.frame_height_px}×{item.frame_width_px} pixels do not make the grid {item.grid}"
            )
        slices = 1 if item.modality is Modality.IMAGE else -(-item.frames // self.patches.temporal_patch)
        if slices != item.grid.t or (item.modality is Modality.IMAGE and item.frames != 1):
            raise PeerContract(f"{item.frames} frames of an {item.modality.value} do not make the grid {item.grid}")


class FrameStream:
    """One Preprocess call: the plan, then slices of what is selected, in the order of selection."""

    def __init__(self, channel: grpc.aio.Channel, options: Mapping[str, Any], expected: Expectation) -> None:
        self._expected = expected
        self._temporal_patch = expected.patches.temporal_patch
        stub = preprocessing_pb2_grpc.PreprocessingServiceStub(channel)
        self._call: Any = stub.Preprocess(**options)
        self._due: deque[tuple[int, MediaPlan]] = deque()
        self._all_selected = False
        self.fetched_ns: int | None = None

    async def plan(self, prompt: prompt_pb2.Prompt, brought: Mapping[int, Grid]) -> PromptPlan:
        """Sends the prompt and returns its plan, checked. brought: see `Expectation.check`.

        `fetched_ns` then says when media that came by URL had been fetched, on this host's monotonic clock.
        """
        modalities = modalities_of(prompt)
        await write_to(self._call, PreprocessRequest(prompt=prompt))
        receiver = PlanReceiver()
        while (message := await self._read()) is not None:
            if not message.HasField("plan"):
                raise PeerContract("preprocessing sent frames before its plan was complete")
            if self.fetched_ns is None and message.HasField("fetched_ago_s"):
                self.fetched_ns = from_ago_s(message.fetched_ago_s, monotonic_ns())
            plan = receiver.add(message.plan)
            if plan is not None:
                self._expected.check(plan, modalities, brought)
                return plan
        raise PeerContract("preprocessing ended before its plan was complete")

    async def select(self, media_index: int, item: MediaPlan) -> None:
        """Asks for one item's frames; the caller has room for all that they will become."""
        self._due.append((media_index, item))
        await write_to(self._call, PreprocessRequest(select=prompt_pb2.Select(media_index=media_index)))

    async def all_selected(self) -> None:
        """Nothing more will be selected: the stream ends after what is due."""
        self._all_selected = True
        await end_writing(self._call)

    async def slices(self) -> AsyncGenerator[FrameSlice, None]:
        """Every slice of every selected item, until the stream ends as it should."""
        while (first := await self._read_frames()) is not None:
            if not self._due:
                raise PeerContract(f"frames of media {first.media_index} came unasked or beyond its plan")
            media_index, item = self._due[0]
            for start in range(0, item.frames, self._temporal_patch):
                chunk = first if start == 0 else await self._read_frames()
                yield await self._slice(media_index, item, start, chunk)
            self._due.popleft()
        if self._due or not self._all_selected:
            due = ", ".join(str(index) for index, _ in self._due) or "what is yet to be selected"
            raise PeerContract(f"the stream ended before the frames of media {due}")

    def cancel(self) -> None:
        self._call.cancel()

    async def _slice(self, media_index: int, item: MediaPlan, start: int, chunk: FramesChunk | None) -> FrameSlice:
        """The slice that starts at frame `start`, of which `chunk` is the first piece."""
        frames = min(self._temporal_patch, item.frames - start)
        shape = (frames, item.frame_height_px, item.frame_width_px, 3)
        buffer: TensorBuffer | None = None
        repaired = decoded_ns = resized_ns = 0
        while buffer is None or not buffer.complete:
            if chunk is None or (chunk.media_index, chunk.first_frame) != (media_index, start):
                came = "nothing" if chunk is None else f"frame {chunk.first_frame} of media {chunk.media_index}"
                raise PeerContract(f"frame {start} of {item.frames} of media {media_index} was due, {came} came")
            if buffer is None:
                buffer = buffer_for(chunk.chunk, [DType.UINT8], shape)
                repaired, heard_ns = chunk.repaired_frames, monotonic_ns()
                decoded_ns = from_ago_s(chunk.decoded_ago_s, heard_ns)
                resized_ns = from_ago_s(chunk.resized_ago_s, heard_ns)
            add_chunk(buffer, chunk.chunk)
            if not buffer.complete:
                chunk = await self._read_frames()
        if not 0 <= repaired <= frames:
            raise PeerContract(f"{repaired} of {frames} frames cannot have been repaired")
        return FrameSlice(media_index, start // self._temporal_patch, buffer, repaired, decoded_ns, resized_ns)

    async def _read_frames(self) -> FramesChunk | None:
        message = await self._read()
        if message is None:
            return None
        if not message.HasField("frames"):
            raise PeerContract("preprocessing sent a second plan")
        return message.frames

    async def _read(self) -> PreprocessResponse | None:
        message: PreprocessResponse | None = await read_from(self._call, STAGE)
        return message
