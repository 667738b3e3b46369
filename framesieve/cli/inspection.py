"""What pruning keeps of one image or video: its frames from preprocessing, its kept tokens from the encoder.

Both services are asked at once, each for the same prompt; their plans must agree.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from common.channels import open_channel, upstream_errors
from common.contract.errors import InvalidRequest, PeerContract
from common.contract.plan import Int32Array, MediaPlan, PromptPlan
from common.contract.retention import Pruning
from common.contract.tensors import DType, TensorBuffer
from common.contract.wire import PlanReceiver, add_chunk, buffer_for
from common.security.credentials import Credentials
from framesieve.client.credentials import Access, credentials_of
from framesieve.client.encoding import encode
from framesieve.client.prompt import Image, Message, Video
from framesieve.client.selecting import EVERYTHING, answers
from framesieve.client.wire import prompt_message
from framesieve.v1 import preprocessing_pb2, preprocessing_pb2_grpc


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


async def inspect(
    preprocessing: str, encoder: str, media: Image | Video, pruning: Pruning, **access: Unpack[Access]
) -> Inspection:
    """Asks the services at the two addresses.

    access: as for `FramesieveClient`, the same for both.
    Raises leaves of FramesieveError, InvalidRequest for embeds among them, and OSError for an unreadable file.
    """
    if media.embeds is not None:
        raise InvalidRequest(f"{type(media).__name__}.embeds have no frames that could be drawn")
    (plan, frames, repaired), (encoded,) = await asyncio.gather(
        _frames(preprocessing, media, credentials_of(access)), encode(encoder, media, pruning, **access)
    )
    if (plan.fingerprint, plan.media[0]) != (encoded.fingerprint, encoded.plan):
        raise PeerContract("preprocessing and the encoder laid one prompt out differently: do both run the same model?")
    return Inspection(encoded.plan, frames, encoded.kept, repaired)


async def _frames(
    address: str, media: Image | Video, credentials: Credentials
) -> tuple[PromptPlan, NDArray[np.uint8], int]:
    """The plan, the item's frames and how many of them were repaired."""
    prompt = await asyncio.to_thread(prompt_message, [Message("user", (media,))])
    asked = preprocessing_pb2.PreprocessRequest(prompt=prompt)
    selected = preprocessing_pb2.PreprocessRequest(select=EVERYTHING)
    plans, plan, repaired = PlanReceiver(), None, 0
    buffer: TensorBuffer | None = None
    slices: list[NDArray[np.uint8]] = []
    async with open_channel(address, credentials) as channel:
        stub = preprocessing_pb2_grpc.PreprocessingServiceStub(channel)
        with upstream_errors("preprocessing"):
            async for response in answers(stub.Preprocess(metadata=credentials.metadata), asked, selected):
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


def _of_one_item(plan: PromptPlan | None) -> PromptPlan | None:
    if plan is not None and len(plan.media) != 1:
        raise PeerContract(f"a prompt of one image or video was laid out with {len(plan.media)}")
    return plan
