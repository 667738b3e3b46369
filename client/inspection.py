"""What pruning keeps of one image or video: its frames from preprocessing, its kept tokens from the encoder.

Both services are asked at once, each for the same prompt; their plans must agree.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from client.prompt import Image, Message, Video
from client.wire import prompt_message, pruning_message
from common.channels import open_channel, upstream_errors
from common.errors import PeerContract
from common.plan import Int32Array, MediaPlan, PromptPlan
from common.retention import Pruning, retained_count
from common.tensors import DType, TensorBuffer
from common.wire import PlanReceiver, add_chunk, buffer_for, int32_array
from framesieve.v1 import encoder_pb2, encoder_pb2_grpc, preprocessing_pb2, preprocessing_pb2_grpc, prompt_pb2


@dataclass(frozen=True, slots=True, eq=False)
class Inspection:
    """What the model was shown of a media item, and what of it was kept.

    frames: uint8 [plan.frames, height, width, 3], RGB.
    kept: int32 [K], strictly increasing, indices into the plan's grid.
    """

    plan: MediaPlan
    frames: NDArray[np.uint8]
    kept: Int32Array
    repaired_frames: int


async def inspect(preprocessing: str, encoder: str, media: Image | Video, pruning: Pruning) -> Inspection:
    """Asks the services at the two addresses. Raises leaves of FramesieveError, and OSError for an unreadable file."""
    prompt = await asyncio.to_thread(prompt_message, [Message("user", (media,))])
    (plan, frames, repaired), (encoders_plan, kept) = await asyncio.gather(
        _frames(preprocessing, prompt), _kept(encoder, prompt, pruning)
    )
    item = plan.media[0]
    if (plan.fingerprint, item) != (encoders_plan.fingerprint, encoders_plan.media[0]):
        raise PeerContract("preprocessing and the encoder laid one prompt out differently: do both run the same model?")
    if kept is None:
        kept = np.arange(item.grid.tokens, dtype=np.int32)
    expected = retained_count(item.grid, pruning, item.modality)
    if kept.size != expected or (np.diff(kept) <= 0).any() or kept[0] < 0 or kept[-1] >= item.grid.tokens:
        raise PeerContract(f"the encoder kept {kept.size} tokens out of order or out of range, {expected} are due")
    return Inspection(item, frames, kept, repaired)


async def _frames(address: str, prompt: prompt_pb2.Prompt) -> tuple[PromptPlan, NDArray[np.uint8], int]:
    """The plan, the item's frames and how many of them were repaired."""
    plans, plan, repaired = PlanReceiver(), None, 0
    buffer: TensorBuffer | None = None
    slices: list[NDArray[np.uint8]] = []
    async with open_channel(address) as channel:
        stub = preprocessing_pb2_grpc.PreprocessingServiceStub(channel)
        with upstream_errors("preprocessing"):
            everything = preprocessing_pb2.PreprocessRequest(select=prompt_pb2.Select(all=True))
            call = stub.Preprocess(iter([preprocessing_pb2.PreprocessRequest(prompt=prompt), everything]))
            async for response in call:
                if plan is None:
                    plan = _of_one_item(plans.add(response.plan))
                    continue
                piece, item = response.frames, plan.media[0]
                repaired += piece.repaired_frames
                shape = (*piece.chunk.shape[:1], item.frame_height_px, item.frame_width_px, 3)
                buffer = buffer or buffer_for(piece.chunk, [DType.UINT8], shape)
                add_chunk(buffer, piece.chunk)
                if buffer.complete:
                    slices.append(np.frombuffer(buffer.data, np.uint8).reshape(buffer.shape))
                    buffer = None
    if plan is None or sum(map(len, slices)) != plan.media[0].frames:
        raise PeerContract("preprocessing's stream ended before its frames did")
    return plan, np.concatenate(slices), repaired


async def _kept(address: str, prompt: prompt_pb2.Prompt, pruning: Pruning) -> tuple[PromptPlan, Int32Array | None]:
    """The plan, and what was kept; None where that is everything."""
    plans, plan = PlanReceiver(), None
    first: encoder_pb2.EmbedsChunk | None = None
    request = encoder_pb2.EncodePrompt(prompt=prompt, pruning=pruning_message(pruning))
    async with open_channel(address) as channel:
        stub = encoder_pb2_grpc.EncoderServiceStub(channel)
        with upstream_errors("encoder"):
            everything = encoder_pb2.EncodeRequest(select=prompt_pb2.Select(all=True))
            call = stub.Encode(iter([encoder_pb2.EncodeRequest(prompt=request), everything]))
            async for response in call:
                if plan is None:
                    plan = _of_one_item(plans.add(response.plan))
                elif first is None and response.WhichOneof("response") == "embeds":
                    first = response.embeds
    if plan is None or first is None:
        raise PeerContract("the encoder's stream ended before its embeddings did")
    return plan, int32_array(first.kept) if first.HasField("kept") else None


def _of_one_item(plan: PromptPlan | None) -> PromptPlan | None:
    if plan is not None and len(plan.media) != 1:
        raise PeerContract(f"a prompt of one image or video was laid out with {len(plan.media)}")
    return plan
