"""Embeddings from the encoder, for callers that want them and no answer.

    (item,) = await encode("127.0.0.1:50052", "clip.mp4")
    answer = await client.ask(Video(embeds=item.as_embeds()), "What moves?", pruning_rate=0.75)

So many questions, each with its own pruning, need the clip decoded and encoded once. What arrives is held to its plan;
embeddings are one checkpoint's (`Encoded.fingerprint`) and mean nothing to another.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from common.channels import open_channel, upstream_errors
from common.contract.errors import InvalidRequest, PeerContract
from common.contract.plan import Int32Array, MediaPlan, Modality, PromptPlan
from common.contract.retention import Pruning, retained_count
from common.contract.tensors import DType, TensorBuffer
from common.contract.wire import PlanReceiver, add_chunk, buffer_for, int32_array, prunings_of
from framesieve.client.credentials import Access, credentials_of
from framesieve.client.prompt import Embeds, PartLike, user_turn
from framesieve.client.selecting import EVERYTHING, answers
from framesieve.client.wire import prompt_message, pruning_message
from framesieve.v1 import encoder_pb2, encoder_pb2_grpc

_DTYPES = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)
_EVERYTHING = Pruning()


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """What the encoder yields for one image or video.

    plan: its grid and time base, and where its tokens would stand in a prompt of these media.
    fingerprint: 32 bytes, of the checkpoint.
    kept: int32 [K], strictly increasing, indices into the plan's grid.
    tensor: bfloat16, float16 or float32 [1 + levels, K, D] as it was sent, level 0 being the embedding.
    repaired_frames: frames that could not be decoded and repeat the one before.
    """

    plan: MediaPlan
    fingerprint: bytes
    kept: Int32Array
    tensor: TensorBuffer
    repaired_frames: int

    @property
    def values(self) -> NDArray[np.float16] | NDArray[np.float32]:
        """The tensor for numpy, which lacks bfloat16: the upper half of a float32, it is widened to a whole one."""
        data, shape = self.tensor.data, self.tensor.shape
        match self.tensor.dtype:
            case DType.BFLOAT16:
                return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
            case DType.FLOAT16:
                return np.frombuffer(data, "<f2").reshape(shape)
            case _:
                return np.frombuffer(data, "<f4").reshape(shape)

    def as_embeds(self) -> Embeds:
        """The same for a prompt to bring in place of the pixels, shown when the frames were.

        Raises InvalidRequest where tokens were pruned, since a prompt brings whole media, or where no frames were.
        """
        tokens = self.plan.grid.tokens
        if self.kept.size != tokens:
            raise InvalidRequest(
                f"a prompt brings embeddings of whole media, here are {self.kept.size} of {tokens} tokens"
            )
        if self.plan.brings_embeds:
            raise InvalidRequest("a prompt brought these embeddings itself: bring the same ones again")
        seconds_per_slice, timestamps_s = _time_base(self.plan)
        return Embeds(
            bytes(self.tensor.data),
            self.plan.grid,
            dtype=self.tensor.dtype.label,
            shape=self.tensor.shape,
            seconds_per_slice=seconds_per_slice,
            timestamps_s=timestamps_s,
        )


async def encode(
    encoder: str, media: PartLike | Sequence[PartLike], pruning: Pruning = _EVERYTHING, **access: Unpack[Access]
) -> tuple[Encoded, ...]:
    """The embeddings of every image and video, in their order.

    encoder: the service's address, host:port or unix:/path.
    media: as for `FramesieveClient.ask`.
    pruning: of every video that has none of its own; nothing is pruned unless it is given.
    access: as for `FramesieveClient`.
    Raises a leaf of FramesieveError with the service's own words, InvalidRequest for more than 16 MiB of files,
    OSError for a file that cannot be read.
    """
    credentials = credentials_of(access)
    prompt = await asyncio.to_thread(prompt_message, [user_turn(media, "")])
    question = encoder_pb2.EncodePrompt(prompt=prompt, pruning=pruning_message(pruning))
    asked, selected = encoder_pb2.EncodeRequest(prompt=question), encoder_pb2.EncodeRequest(select=EVERYTHING)
    plans, plan = PlanReceiver(), None
    pieces: dict[int, list[encoder_pb2.EmbedsChunk]] = defaultdict(list)
    async with open_channel(encoder, credentials) as channel:
        stub = encoder_pb2_grpc.EncoderServiceStub(channel)
        with upstream_errors("encoder"):
            async for response in answers(stub.Encode(metadata=credentials.metadata), asked, selected):
                if plan is None:
                    plan = plans.add(response.plan)
                elif response.WhichOneof("response") == "embeds":
                    pieces[response.embeds.media_index].append(response.embeds)
    prunings = prunings_of(prompt, question.pruning)
    if plan is None or len(plan.media) != len(prunings):
        raise PeerContract(f"the encoder's plan is incomplete or not one of {len(prunings)} images and videos")
    if sorted(pieces) != list(range(len(prunings))):
        raise PeerContract(f"the encoder sent embeddings of the items {sorted(pieces)}, {len(prunings)} are due")
    return tuple(_encoded(plan, index, pieces[index], each) for index, each in enumerate(prunings))


def _time_base(item: MediaPlan) -> tuple[Fraction | None, tuple[float, ...]]:
    """Seconds per slice, or when each is shown: slices that stand apart in the prompt stand behind their own times.

    A slice is shown between its first and its last frame. An image has neither.
    """
    if item.modality is Modality.IMAGE or len(item.runs) != item.grid.t:
        return item.seconds_per_grid, ()
    frames = item.frames // item.grid.t
    firsts, lasts = item.timestamps_s[::frames], item.timestamps_s[frames - 1 :: frames]
    return None, tuple((first + last) / 2 for first, last in zip(firsts, lasts, strict=True))


def _encoded(plan: PromptPlan, index: int, pieces: list[encoder_pb2.EmbedsChunk], pruning: Pruning) -> Encoded:
    item, first = plan.media[index], pieces[0]
    kept = _kept(first, item, pruning)
    buffer = buffer_for(first.chunk, _DTYPES, (1 + plan.embed_levels, kept.size, *first.chunk.shape[-1:]))
    for piece in pieces:
        add_chunk(buffer, piece.chunk)
    if not buffer.complete:
        raise PeerContract(f"item {index} ended after {buffer.received_bytes} of {buffer.data.nbytes} bytes")
    return Encoded(item, plan.fingerprint, kept, buffer, first.repaired_frames)


def _kept(first: encoder_pb2.EmbedsChunk, item: MediaPlan, pruning: Pruning) -> Int32Array:
    """What the first piece says was kept; where it says nothing, that is everything."""
    kept = int32_array(first.kept) if first.HasField("kept") else np.arange(item.grid.tokens, dtype=np.int32)
    expected = retained_count(item.grid, pruning, item.modality)
    if kept.shape != (expected,) or (np.diff(kept) <= 0).any() or kept[0] < 0 or kept[-1] >= item.grid.tokens:
        raise PeerContract(f"the encoder kept {kept.size} tokens out of order or out of range, {expected} are due")
    return kept
