"""Fetches the embeddings of media from the encoder, without generating text.

    (item,) = await encode("127.0.0.1:50052", "clip.mp4")
    answer = await client.ask(Video(embeds=item.as_embeds()), "What moves?", pruning_rate=0.75)

A clip is then decoded and encoded once for many questions, each with its own pruning. The received tensors are checked
against the plan. Embeddings are only valid for the checkpoint that made them (`Encoded.fingerprint`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from gridsieve.client.credentials import Access, credentials_of
from gridsieve.client.messages import add_messages, pruning_message, python_remedies
from gridsieve.client.prompt import Embeds, PartLike, Pruning, user_turn
from gridsieve.common.channels import end_writing, open_channel, upstream_errors, write_to
from gridsieve.common.contract.errors import InvalidRequest, PeerContract
from gridsieve.common.contract.plan import Int32Array, MediaPlan, Modality, PromptPlan
from gridsieve.common.contract.received import check_media, received_kept, received_plan
from gridsieve.common.contract.retention import METHODS, ItemPruning, num_kept
from gridsieve.common.contract.tensors import DType, TensorBuffer
from gridsieve.common.contract.wire import add_chunk, buffer_for, prunings_of
from gridsieve.v1 import encoder_pb2, encoder_pb2_grpc, prompt_pb2

SELECT_ALL = prompt_pb2.Select(all=True)
_DTYPES = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)
_EVERYTHING = Pruning()


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """The encoder's output for one image or video.

    plan: its grid, time base and token positions in a prompt of these media.
    fingerprint: 32 bytes that identify the checkpoint.
    kept: int32 [K], strictly increasing indices of the kept tokens in the plan's grid.
    tensor: bfloat16, float16 or float32 [1 + levels, K, D]; level 0 is the embedding, the others deepstack features.
    repaired_frames: frames that could not be decoded and were replaced by the previous frame.
    pruning: how the tokens were chosen, also where the request names no method.
    """

    plan: MediaPlan
    fingerprint: bytes
    kept: Int32Array
    tensor: TensorBuffer
    repaired_frames: int
    pruning: ItemPruning

    @property
    def values(self) -> NDArray[np.float16] | NDArray[np.float32]:
        """The tensor as a numpy array; bfloat16, which numpy lacks, is widened to float32."""
        data, shape = self.tensor.data, self.tensor.shape
        match self.tensor.dtype:
            case DType.BFLOAT16:
                return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
            case DType.FLOAT16:
                return np.frombuffer(data, "<f2").reshape(shape)
            case _:
                return np.frombuffer(data, "<f4").reshape(shape)

    def as_embeds(self) -> Embeds:
        """The embeddings in the form that a prompt takes in place of pixels, with the same time base.

        Raises InvalidRequest if tokens were pruned (a prompt needs all tokens of the grid), if this item was sent as
        embeddings in the first place, if it is a sound, an image of several tiles whose tokens are put together, or a
        video whose frames have slices.
        """
        tokens, frames = self.plan.grid.tokens, self.plan.frames
        if self.kept.size != tokens:
            text = f"a prompt needs the embeddings of all {tokens} tokens, got {self.kept.size}"
            raise InvalidRequest(text, value=self.kept.size, limit=tokens, remedy="encode without pruning")
        if self.plan.modality is Modality.VIDEO and frames.tile_columns:
            text = "a video whose frames have slices cannot be sent as embeddings"
            raise InvalidRequest(text, remedy="send the video again")
        # Where each frame is a row of the grid, its tokens stay its own.
        if self.plan.modality is Modality.IMAGE and frames.count > 1 and frames.count != self.plan.grid.h:
            text = f"an image of {frames.count} tiles cannot be sent as embeddings"
            raise InvalidRequest(text, remedy="send the image again")
        if self.plan.modality is Modality.AUDIO:
            raise InvalidRequest("a sound cannot be sent as embeddings", remedy="send the sound again")
        if self.plan.brings_embeds:
            raise InvalidRequest("this item was sent as embeddings", remedy="pass the same Embeds again")
        seconds_per_slice, timestamps_s = _time_base(self.plan)
        return Embeds(
            bytes(self.tensor.data),
            self.plan.grid,
            dtype=self.tensor.dtype.label,
            shape=self.tensor.shape,
            seconds_per_slice=seconds_per_slice,
            timestamps_s=timestamps_s,
            tile_columns=frames.tile_columns,
        )


async def encode(
    encoder: str,
    media: PartLike | Sequence[PartLike],
    pruning: Pruning = _EVERYTHING,
    cache_salt: str = "",
    **access: Unpack[Access],
) -> tuple[Encoded, ...]:
    """Returns the embeddings of every image, video and sound, in order.

    encoder: the encoder's address, host:port or unix:/path.
    media: as for `GridsieveClient.ask`.
    pruning: of videos that do not say their own. Without a rate and a threshold all tokens are kept. A rate without a
        method: by "pixel_change" where the model takes it, else by "evs"; `Encoded.pruning` tells it.
    cache_salt: as in `Options`.
    access: as for `GridsieveClient`.
    Raises a subclass of GridsieveError with the service's message, InvalidRequest for more files than the
    service takes (64 MiB by default), OSError for a file that cannot be read.
    """
    credentials = credentials_of(access)
    first = encoder_pb2.EncodeRequest(prompt=encoder_pb2.EncodePrompt(pruning=pruning_message(pruning)))
    first.prompt.prompt.cache_salt = cache_salt
    await asyncio.to_thread(add_messages, first.prompt.prompt, [user_turn(media, "")])
    select_all = encoder_pb2.EncodeRequest(select=SELECT_ALL)
    pieces: dict[int, list[encoder_pb2.EmbedsChunk]] = defaultdict(list)
    async with open_channel(encoder, credentials) as channel:
        stub = encoder_pb2_grpc.EncoderServiceStub(channel)
        with python_remedies(), upstream_errors("encoder"):
            answers = responses(stub.Encode(metadata=credentials.metadata), first, select_all)
            plan, _ = await received_plan(lambda: anext(answers, None))
            check_media(plan, first.prompt.prompt)
            async for response in answers:
                if response.HasField("embeds"):
                    pieces[response.embeds.media_index].append(response.embeds)
    prunings = prunings_of(first.prompt.prompt, first.prompt.pruning)
    if sorted(pieces) != list(range(len(prunings))):
        raise PeerContract(f"the encoder sent embeddings of items {sorted(pieces)}, expected {len(prunings)} items")
    return tuple(_encoded(plan, index, pieces[index], each) for index, each in enumerate(prunings))


async def responses(call: Any, prompt: Any, select: Any) -> AsyncIterator[Any]:
    """Yields the responses of a Preprocess or Encode call, selecting all media once the plan starts to arrive.

    call: the stream-stream call. prompt, select: its two request messages.
    """
    await write_to(call, prompt)
    selected = False
    async for response in call:
        if not selected:
            selected = True
            await write_to(call, select)
            await end_writing(call)
        yield response


def _time_base(item: MediaPlan) -> tuple[Fraction | None, tuple[float, ...]]:
    """Seconds per slice, or the time of each slice where every slice has its own run of tokens after a timestamp.

    A slice's time is that of its first frame, or the midpoint of its first and last one. An image has neither.
    """
    if item.modality is not Modality.VIDEO or len(item.runs) != item.grid.t:
        return item.seconds_per_grid, ()
    step, times = item.slice_frames, item.timestamps_s
    slices = (times[first : first + step] for first in range(0, len(times), step))
    return None, tuple(each[0] if item.timed_by_first else (each[0] + each[-1]) / 2 for each in slices)


def _encoded(plan: PromptPlan, index: int, pieces: list[encoder_pb2.EmbedsChunk], pruning: ItemPruning) -> Encoded:
    item, first = plan.media[index], pieces[0]
    least = None if pruning.threshold is None or item.modality is not Modality.VIDEO else 1
    kept = received_kept(first, item.grid, num_kept(item.grid, pruning, item.modality), least)
    if kept is None:
        kept = np.arange(item.grid.tokens, dtype=np.int32)
    buffer = buffer_for(first.chunk, _DTYPES, (1 + plan.embed_levels, kept.size, *first.chunk.shape[-1:]))
    for piece in pieces:
        add_chunk(buffer, piece.chunk)
    if not buffer.complete:
        raise PeerContract(
            f"the stream ended after {buffer.received_bytes} of {buffer.data.nbytes} bytes of item {index}"
        )
    possible = METHODS if pruning.threshold is None else (pruning.method,)
    if (method := first.method or pruning.method) not in possible:
        raise PeerContract(f"the encoder's pruning method must be one of {', '.join(possible)}, got {method!r}")
    return Encoded(item, plan.fingerprint, kept, buffer, first.repaired_frames, replace(pruning, method=method))
