"""Hand-written services for tests of the command: fixed responses, recorded requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from fractions import Fraction
from typing import Any

import grpc
import numpy as np

from gridsieve.common.contract.errors import InvalidRequest, MediaDamaged
from gridsieve.common.contract.plan import FrameShape, Grid, MediaPlan, Modality, PromptPlan, Run
from gridsieve.common.contract.tensors import DType
from gridsieve.common.contract.wire import int32_tensor, plan_messages, tensor_chunks
from gridsieve.common.serving.status import DETAILS_KEY, status_details
from gridsieve.v1 import (
    encoder_pb2,
    encoder_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    preprocessing_pb2,
    preprocessing_pb2_grpc,
    prompt_pb2,
)


def plan_of(grid: Grid, runs: tuple[Run, ...], tokens: int, token_px: int, embed_levels: int) -> PromptPlan:
    """The plan of a prompt with one video of four frames."""
    video = MediaPlan(
        modality=Modality.VIDEO,
        grid=grid,
        runs=runs,
        frames=FrameShape(4, (grid.h * token_px, grid.w * token_px)),
        seconds_per_grid=Fraction(1),
        timestamps_s=(0.0, 0.5, 1.0, 1.5),
        content_hash=bytes(32),
    )
    ids, positions = np.arange(tokens, dtype=np.int32), np.zeros((3, tokens), dtype=np.int32)
    return PromptPlan(ids, positions, (video,), embed_levels, fingerprint=bytes(32))


PLAN = plan_of(Grid(t=2, h=2, w=2), (Run(1, 8),), tokens=10, token_px=28, embed_levels=0)
# As a family with 32-pixel tokens, text between the slices and deepstack would be planned.
SLICES_APART = plan_of(Grid(t=2, h=2, w=3), (Run(6, 6), Run(17, 6)), tokens=24, token_px=32, embed_levels=3)
# An image of which a source picture and two rows of three slices are sent, which have another size.
SLICED = PromptPlan(
    np.arange(9, dtype=np.int32),
    np.zeros((3, 9), dtype=np.int32),
    (
        MediaPlan(
            modality=Modality.IMAGE,
            grid=Grid(1, 7, 1),
            runs=(Run(1, 7),),
            frames=FrameShape(7, (28, 42), (42, 28), tile_columns=3),
            seconds_per_grid=None,
            timestamps_s=(),
            content_hash=bytes(32),
        ),
    ),
    embed_levels=0,
    fingerprint=bytes(32),
)
REFUSAL = MediaDamaged("12 of 40 frames [0.30] cannot be decoded")
METHODS = ("evs", "random", "vidcom2", "none", "pixel_change", "vcast")
BEGAN_S = 1_796_031_900.0  # 2026-11-30 09:45:00 UTC, when live sessions begin
# Of the first completion's two tokens, on the four kept tokens of the first slice: a quarter of the whole.
ATTENTION = generation_pb2.Attention(
    media=[
        generation_pb2.MediaAttention(
            kept=[0, 1, 2, 3],
            weights=[0.16, 0.04, 0.04, 0.01],
            token_shares=[0.4, 0.1],
            token_weights=[0.28, 0.06, 0.05, 0.01, 0.04, 0.02, 0.03, 0.01],
        )
    ],
    text_share=0.75,
    tokens=["A red ", "ball ⚽"],
)
COMPLETIONS = (("A red ", "ball ⚽"), ("Some", "thing"), ("", ""))


class FakeServices(
    generation_pb2_grpc.GenerationServiceServicer,
    encoder_pb2_grpc.EncoderServiceServicer,
    preprocessing_pb2_grpc.PreprocessingServiceServicer,
):
    """All three services. `kept` is the encoder's result (None: the field is unset). `methods`: those that the model
    takes; the last is that of a rate without one. `rate`, `threshold`: of videos for which a request names none.

    Completions arrive interleaved, and the last of them finishes first. The question "refuse" is refused, and "hang"
    hangs after the first token of each completion.
    """

    def __init__(self) -> None:
        self.plan = PLAN
        self.kept: list[int] | None = [0, 1, 2, 3]
        self.refusal = REFUSAL
        self.methods = METHODS
        self.rate, self.threshold = 0.0, None
        self.asked: list[Any] = []
        self.running = self.most_running = 0
        self.hangs = threading.Event()
        self.cancelled = threading.Event()
        self.opened: Any = None

    async def ListModels(self, request: Any, context: Any) -> AsyncIterator[Any]:
        methods = [generation_pb2.PruningMethod(name=name) for name in self.methods]
        default = prompt_pb2.Pruning(method=self.methods[-1], rate=self.rate, threshold=self.threshold)
        yield generation_pb2.ListModelsResponse(name="fake", pruning=default, pruning_methods=methods)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.asked.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        question = request.prompt.messages[-1].parts[-1].text
        if question == "refuse":
            details = status_details(self.refusal).SerializeToString()
            self.running -= 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(self.refusal), ((DETAILS_KEY, details),))
        video = generation_pb2.MediaUsage(
            modality=prompt_pb2.MODALITY_VIDEO,
            grid=prompt_pb2.Grid(t=2, h=2, w=2),
            num_kept=4,
            repaired_frames=3,
            first_slice_only=True,
        )
        usage = generation_pb2.Usage(prompt_tokens_full=12, prompt_tokens=8, media=[video])
        yield generation_pb2.GenerateResponse(accepted=generation_pb2.Accepted(request_id="r1", usage=usage))
        yield generation_pb2.GenerateResponse(
            progress=encoder_pb2.MediaProgress(media_index=0, decoded_slices=2, encoded_slices=1)
        )
        indices = range(request.sampling.n or 1)
        for index in indices:
            yield self._delta(request.sampling, index, COMPLETIONS[index][0], 1)
        if question == "hang":
            self.hangs.set()
            try:
                await asyncio.sleep(20)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        for index in indices:
            yield self._delta(request.sampling, index, COMPLETIONS[index][1], 2)
        usage.completion_tokens = 2
        self.running -= 1
        for index in reversed(indices):
            yield generation_pb2.GenerateResponse(
                finished=generation_pb2.Finished(
                    choice_index=index,
                    reason=generation_pb2.FINISH_REASON_STOP,
                    usage=usage,
                    timings=generation_pb2.Timings(time_to_first_token_s=0.5, decode_s=0.5, generate_s=0.25),
                    attention=ATTENTION if request.sampling.attention else None,
                )
            )

    def _delta(self, sampling: Any, index: int, text: str, token_id: int) -> Any:
        delta = generation_pb2.Delta(choice_index=index, text=text, token_ids=[token_id])
        if sampling.logprobs:
            delta.logprobs.append(-0.5)
            delta.token_texts[token_id] = text
            delta.token_texts[9] = "nine"
        if sampling.top_logprobs:
            delta.top_logprobs.add(token_ids=[token_id, 9], logprobs=[-0.5, -1.5])
        return generation_pb2.GenerateResponse(delta=delta)

    async def Live(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Records frames and questions. Asks nothing by itself. With snapshots, every second frame ends a slice."""
        frames: list[Any] = []
        async for request in requests:
            match kind := request.WhichOneof("request"):
                case "open":
                    self.opened = request.open
                    yield generation_pb2.LiveResponse(accepted=generation_pb2.LiveAccepted(request_id="r1"))
                case "frame" | "ask":
                    self.asked.append(getattr(request, kind))
                case "close":
                    return
            if kind == "frame" and self.opened.snapshots == generation_pb2.SNAPSHOTS_SLICES:
                frames.append(request.frame)
                if len(frames) % 2 == 0:
                    yield generation_pb2.LiveResponse(slice=_slice(*frames[-2:]))
            if kind == "ask":
                name, finished = request.ask.ask_id, generation_pb2.Finished(reason=generation_pb2.FINISH_REASON_STOP)
                delta = generation_pb2.LiveDelta(ask_id=name, delta=generation_pb2.Delta(text="A red ball"))
                yield generation_pb2.LiveResponse(delta=delta)
                ended = generation_pb2.LiveFinished(ask_id=name, finished=finished)
                yield generation_pb2.LiveResponse(finished=ended)

    async def Preprocess(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        self.asked.append((await anext(requests)).prompt)
        for plan in plan_messages(self.plan):
            yield preprocessing_pb2.PreprocessResponse(plan=plan)
        assert (await anext(requests)).select.all
        item = self.plan.media[0]
        for first in range(0, item.frames.count, item.slice_frames):
            shape = (item.slice_frames, *item.frames.frame_px(first), 3)
            frames = np.full(shape, 40 + 30 * first, dtype=np.uint8)
            for chunk in tensor_chunks(DType.UINT8, shape, frames.data):
                yield preprocessing_pb2.PreprocessResponse(
                    frames=preprocessing_pb2.FramesChunk(first_frame=first, chunk=chunk, repaired_frames=first)
                )

    async def Encode(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        prompt = (await anext(requests)).prompt
        self.asked.append(prompt)
        unnamed = "pixel_change" if prompt.pruning.HasField("threshold") else self.methods[-1]
        if (method := prompt.pruning.method or unnamed) not in self.methods:
            error = InvalidRequest(field="pruning.method", limit=f"one of {', '.join(self.methods)}", value=method)
            details = status_details(error).SerializeToString()
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error), ((DETAILS_KEY, details),))
        for plan in plan_messages(self.plan):
            yield encoder_pb2.EncodeResponse(plan=plan)
        assert (await anext(requests)).select.all
        count = self.plan.media[0].grid.tokens if self.kept is None else len(self.kept)
        shape = (1 + self.plan.embed_levels, count, 4)
        kept = None if self.kept is None else int32_tensor(np.array(self.kept, dtype=np.int32))
        for chunk in tensor_chunks(DType.FLOAT32, shape, np.zeros(shape, dtype=np.float32).data):
            yield encoder_pb2.EncodeResponse(embeds=encoder_pb2.EmbedsChunk(kept=kept, chunk=chunk, method=method))


def _slice(first: Any, last: Any) -> Any:
    return generation_pb2.LiveSlice(
        first_time_s=first.time_s,
        last_time_s=last.time_s,
        grid=prompt_pb2.Grid(t=1, h=1, w=1),
        kept=int32_tensor(np.zeros(1, np.int32)),
        wall_time_s=BEGAN_S + last.time_s,
        wall_clock=generation_pb2.WALL_CLOCK_SERVICE,
        snapshot=last.picture,
    )
