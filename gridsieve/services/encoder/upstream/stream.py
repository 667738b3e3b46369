"""A stream from preprocessing: one call of Preprocess, its checks, and which cache entry gets which slice.

    caller A   plan ─ deliver X ─ gone
    stream A         X X X X X X X X X X     continues, since B waits for X; cancelled with the last waiter
    caller B          plan ─ wait for X ──▶ answered

Each request opens one stream, because media are opened, fetched and hashed while its plan is made. Its slices may be
shared with other requests, so the call runs without the caller's deadline and may outlive the caller. If a stream
fails, another request that waits for an entry fills it from a stream of its own.
Anything that the plan did not announce raises PeerContract.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from time import monotonic_ns
from typing import Any

import numpy as np

from gridsieve.common.channels import end_writing, read_from, write_to
from gridsieve.common.contract.errors import DeadlinePassed, Overloaded, PeerContract, Unavailable
from gridsieve.common.contract.plan import DIGEST_BYTES, Int32Array, MediaPlan, Modality, PromptPlan
from gridsieve.common.contract.received import received_plan
from gridsieve.common.contract.retention import ItemPruning, reference_bytes
from gridsieve.common.contract.wire import add_chunk, buffer_for, from_ago_s, int32_array, pruning_message
from gridsieve.common.handover import Receiver
from gridsieve.services.encoder.items.decoded_slices import FrameSlice
from gridsieve.services.encoder.items.pending_entry import Delivery, PendingEntry
from gridsieve.services.encoder.upstream.plan_check import PlanCheck
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.preprocessing_pb2 import FramesChunk, PreprocessRequest, PreprocessResponse

STAGE = "preprocessing"

# Errors that say nothing about the media being decoded: another stream may succeed.
_RETRIABLE = (Unavailable, DeadlinePassed, Overloaded, asyncio.CancelledError)


class PreprocessStream:
    """One call of Preprocess: the plan, then the slices of selected items, in the order of selection.

    It belongs to its request until `detach`, then to the waiters of the entries that it fills.
    """

    def __init__(self, call: Any, plan_check: PlanCheck, receiver: Receiver | None = None) -> None:
        """call: of Preprocess, just begun. receiver: of frames in shared memory; the stream closes it."""
        self.fetched_ns: int | None = None  # when media fetched by URL were complete; set by `plan`, if there are any
        self._plan_check = plan_check
        self._receiver = receiver
        self._call = call
        self._due: list[Delivery] = []  # selected, in this order
        self._all_selected = False
        self._detached = False
        self._writing = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None

    async def plan(self, prompt: prompt_pb2.Prompt, files: AsyncIterator[tuple[str, bytes]]) -> PromptPlan:
        """Sends the prompt and its files, returns its plan, checked, and starts reading frames.

        files: from `received_pieces`, passed on piece by piece. Raises what `files` raises.
        """
        writing = asyncio.create_task(self._write_prompt(prompt, files))
        reading = asyncio.create_task(self._read_plan(prompt))
        try:
            await asyncio.wait([writing, reading], return_when=asyncio.FIRST_EXCEPTION)
            if writing.done():
                writing.result()
            return await reading
        finally:
            for each in (writing, reading):
                each.cancel()
            await asyncio.wait([writing, reading])

    async def _write_prompt(self, prompt: prompt_pb2.Prompt, files: AsyncIterator[tuple[str, bytes]]) -> None:
        handover = self._receiver.address if self._receiver else b""
        await write_to(self._call, PreprocessRequest(prompt=prompt, handover=handover))
        async for _, piece in files:
            await write_to(self._call, PreprocessRequest(file={"data": piece}))

    async def _read_plan(self, prompt: prompt_pb2.Prompt) -> PromptPlan:
        plan, self.fetched_ns = await received_plan(self._read_message)
        self._plan_check.check(plan, prompt)
        self._reading = asyncio.create_task(self._read())
        self._reading.add_done_callback(self._end_reading)
        return plan

    async def deliver(self, media_index: int, pending: PendingEntry) -> Delivery:
        """Reserves bytes for an entry that needs a delivery, then selects the item, whose slices fill the entry.

        Raises the stream's error if it has failed.
        """
        delivery = Delivery(media_index, pending, self._cancel_if_unwanted)
        try:
            await pending.reserve()
            await self._select(delivery)
        except BaseException:
            delivery.end()
            raise
        return delivery

    async def all_selected(self) -> None:
        """Declares that nothing more will be selected: the stream ends after the frames that are due."""
        async with self._writing:
            self._all_selected = True
            await end_writing(self._call)

    async def wait_until_finished(self) -> None:
        """Waits until the stream has ended as it should. Raises its error otherwise."""
        assert self._reading is not None
        await asyncio.wait([self._reading])
        self._reading.result()

    def detach(self) -> None:
        """Ends the request's claim to the stream, which continues while other requests wait for its slices."""
        self._detached = True
        self._cancel_if_unwanted()
        if self._reading is None:
            self._close_receiver()

    def _cancel_if_unwanted(self) -> None:
        """Cancels the call once its request has detached and nothing waits for its deliveries."""
        if self._detached and not any(each.wanted for each in self._due):
            self._call.cancel()
            if self._reading is not None:
                self._reading.cancel()

    async def _select(self, delivery: Delivery) -> None:
        async with self._writing:
            assert self._reading is not None
            if self._reading.done():
                self._reading.result()
            self._due.append(delivery)
            chosen = delivery.pending.chosen
            select = prompt_pb2.Select(media_index=delivery.media_index)
            if chosen is not None:
                select.pruning.CopyFrom(pruning_message(chosen))
                select.first_slice, select.reference = chosen.first_slice, chosen.reference
            await write_to(self._call, PreprocessRequest(select=select))

    async def _read(self) -> None:
        try:
            await self._read_items()
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Ends all deliveries. An error of the media fails the first entry; the others get another delivery."""
        active = [each for each in self._due if each.active]
        if active and not isinstance(error, _RETRIABLE):
            active[0].pending.fail(error)
        for delivery in active:
            delivery.end()

    async def _read_items(self) -> None:
        """Delivers every slice of every selected item. Raises PeerContract if the stream ends before it should."""
        while (first := await self._read_frames()) is not None:
            if not self._due:
                raise PeerContract(f"frames of media {first.media_index} were not selected or exceed its plan")
            delivery = self._due[0]
            item = delivery.pending.plan
            for start in range(0, item.frames.count, item.slice_frames):
                chunk = first if start == 0 else await self._read_frames()
                piece = await self._read_slice(delivery, start, chunk)
                if delivery.active:  # else its request was cancelled while the selection was being sent
                    await delivery.pending.add_slice(piece)
            self._due.pop(0)
            delivery.end()
            self._cancel_if_unwanted()
        if self._due or not self._all_selected:
            due = ", ".join(str(each.media_index) for each in self._due) or "items that may still be selected"
            raise PeerContract(f"the stream ended before the frames of media {due} had arrived")

    async def _read_slice(self, delivery: Delivery, start: int, chunk: FramesChunk | None) -> FrameSlice:
        """The slice that starts at frame `start`. chunk: its first message."""
        item = delivery.pending.plan
        frames = min(item.slice_frames, item.frames.count - start)
        first = _expected(delivery, start, chunk)
        repaired, heard_ns = first.repaired_frames, monotonic_ns()
        if not 0 <= repaired <= frames:
            raise PeerContract(f"{repaired} of {frames} frames cannot have been repaired")
        made = (repaired, from_ago_s(first.decoded_ago_s, heard_ns), from_ago_s(first.resized_ago_s, heard_ns))
        index, chosen = start // item.slice_frames, delivery.pending.chosen
        reference = _reference(first, item, chosen)
        if first.HasField("repeats_frame"):
            return FrameSlice(index, None, *made, repeats=_repeated(first, item), reference=reference)
        kept = _kept(first, item, chosen is not None)
        side = item.frames.size_px[0] // item.grid.h
        size_px = item.frame_px(start) if kept is None else (side * kept.size, side)
        take = self._receiver.take if self._receiver else None
        buffer = buffer_for(first.chunk, [item.frames.dtype], (frames, *size_px, item.channels), take)
        add_chunk(buffer, first.chunk)
        while not buffer.complete:
            add_chunk(buffer, _expected(delivery, start, await self._read_frames()).chunk)
        return FrameSlice(index, buffer, *made, kept, _digest(first), reference=reference)

    async def _read_frames(self) -> FramesChunk | None:
        message = await self._read_message()
        if message is None:
            return None
        if not message.HasField("frames"):
            raise PeerContract("preprocessing sent a second plan")
        return message.frames

    async def _read_message(self) -> PreprocessResponse | None:
        message: PreprocessResponse | None = await read_from(self._call, STAGE)
        return message

    def _end_reading(self, reading: asyncio.Task[None]) -> None:
        """Marks the task's error as retrieved: if nothing waits for the stream any more, asyncio would log it."""
        self._close_receiver()
        if not reading.cancelled():
            reading.exception()

    def _close_receiver(self) -> None:
        if self._receiver is not None:
            self._receiver.close()


def _expected(delivery: Delivery, start: int, chunk: FramesChunk | None) -> FramesChunk:
    """A message, if it is of the slice that starts at frame `start`."""
    media_index, item = delivery.media_index, delivery.pending.plan
    if chunk is None or (chunk.media_index, chunk.first_frame) != (media_index, start):
        came = "nothing" if chunk is None else f"frame {chunk.first_frame} of media {chunk.media_index}"
        raise PeerContract(f"expected frame {start} of {item.frames.count} of media {media_index}, got {came}")
    return chunk


def _repeated(first: FramesChunk, item: MediaPlan) -> int:
    """The index of the slice that a slice repeats, in its only message."""
    index, rest = divmod(first.repeats_frame, item.slice_frames)
    earlier = 0 <= first.repeats_frame < first.first_frame and not rest
    whole = first.first_frame + item.slice_frames <= item.frames.count
    repeatable = item.modality is Modality.VIDEO and not item.frames.group_frames
    sent = first.HasField("chunk") or first.HasField("kept") or first.digest
    if not (repeatable and earlier and whole) or sent:
        place = f"frame {first.first_frame} of media {first.media_index}"
        raise PeerContract(f"the slice at {place} was sent, or cannot repeat frame {first.repeats_frame}")
    return index


def _digest(first: FramesChunk) -> bytes:
    """The digest of a slice, in its first message; empty if it has none."""
    if len(first.digest) not in (0, DIGEST_BYTES):
        raise PeerContract(f"the digest of a slice has {DIGEST_BYTES} bytes, got {len(first.digest)}")
    return first.digest


def _reference(first: FramesChunk, item: MediaPlan, chosen: ItemPruning | None) -> bytes:
    """What was last shown of each place, in the first message of the last slice, if it was asked for; else empty."""
    last = first.first_frame + item.slice_frames >= item.frames.count
    size_bytes = reference_bytes(item.grid) if last and chosen and chosen.first_slice else 0
    if len(first.reference) != size_bytes:
        place = f"frame {first.first_frame} of media {first.media_index}"
        raise PeerContract(f"the reference at {place} must have {size_bytes} bytes, got {len(first.reference)}")
    return first.reference


def _kept(first: FramesChunk, item: MediaPlan, chosen: bool) -> Int32Array | None:
    """The chosen tokens of a slice, int32 [k], in its first message; None for a slice that is whole.

    chosen: whether tokens were to be chosen.
    """
    if first.HasField("kept") != chosen:
        raise PeerContract(f"media {first.media_index}: `kept` must be sent if and only if tokens were to be chosen")
    if not chosen:
        return None
    kept, tokens = int32_array(first.kept), item.grid.slice_tokens
    if kept.ndim != 1 or (kept.size and (kept[0] < 0 or kept[-1] >= tokens or (np.diff(kept) <= 0).any())):
        raise PeerContract(
            f"a slice of media {first.media_index} must say which of its {tokens} tokens are sent, in increasing order"
        )
    return kept
