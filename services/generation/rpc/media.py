"""The client of the encoder: receives a prompt's plan, then its media items, into bytes that are reserved first.

    open ─▶ plan, checked ─▶ reserve bytes for the items that the cache lacks ─▶ select ─▶ pieces ─▶ item, checked

The plan of a prompt without media comes from preprocessing directly. Everything that a peer sends is checked here;
violations raise PeerContract. If an encoder is lost, another one is asked for the items that are still missing:

    call ─▶ plan ─▶ select ─▶ pieces … lost ─▶ back off ─▶ call ─▶ the same plan ─▶ select the missing ones ─▶ pieces

This module does not know the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns
from typing import Any, TypeAlias

import grpc
import numpy as np
import structlog
import torch

from common.byte_semaphore import ByteSemaphore
from common.channels import end_writing, read_from, write_to
from common.contract.errors import DeadlinePassed, PeerContract, PromptTooLong, Unavailable
from common.contract.plan import Int32Array, MediaPlan, PromptPlan, tagged_digest
from common.contract.requests import check_prompt
from common.contract.retention import Pruning, retained_count
from common.contract.tensors import DType, TensorBuffer
from common.contract.wire import (
    PlanReceiver,
    add_chunk,
    buffer_for,
    from_ago_s,
    grid_message,
    int32_array,
    modalities_of,
    named_media,
    prunings_of,
)
from common.serving.retries import Retries
from common.telemetry.metrics import busy
from framesieve.v1 import encoder_pb2, preprocessing_pb2, prompt_pb2
from framesieve.v1.encoder_pb2_grpc import EncoderServiceStub
from framesieve.v1.preprocessing_pb2_grpc import PreprocessingServiceStub
from services.generation.kv_cache.encoded_media import encoded_media_key
from services.generation.request.encoded_media import MediaItem
from services.generation.rpc.prompt_limit import advice
from services.generation.rpc.timing import Stage, StageClock
from services.generation.to_device import pinned_for

TORCH_DTYPES = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16, DType.FLOAT32: torch.float32}

Call: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"
Selected: TypeAlias = "asyncio.Future[Sequence[int]]"

_DIGEST_DOMAIN = b"framesieve media item v2"
_STAGES_OF_ITEMS = (Stage.DECODE, Stage.RESIZE, Stage.WAIT_FOR_ENCODER, Stage.ENCODE, Stage.PRUNE)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What the language model takes, and peers therefore must send.

    fingerprint: of its checkpoint. embed_levels: deepstack tensors beside a media token's embedding. dtype, device: of
    its weights.
    """

    fingerprint: bytes
    vocab_size: int
    hidden_size: int
    embed_levels: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of a media item is decoded and encoded, in temporal slices."""

    media_index: int
    decoded_slices: int
    encoded_slices: int


class MediaClient:
    """Opens a session for each request. All sessions reserve bytes from the same semaphore."""

    def __init__(
        self, preprocessing: grpc.aio.Channel, encoder: grpc.aio.Channel, model: ModelInput, room: ByteSemaphore
    ) -> None:
        self._preprocessing = PreprocessingServiceStub(preprocessing)
        self._encoder = EncoderServiceStub(encoder)
        self._model = model
        self._room = room
        self._preprocessing_retries = Retries("preprocessing")
        self._encoder_retries = Retries("encoder")

    @asynccontextmanager
    async def open(
        self, prompt: prompt_pb2.Prompt, pruning: prompt_pb2.Pruning, clock: StageClock, **call: Any
    ) -> AsyncIterator[MediaSession]:
        """A session that has received its plan. Leaving it cancels the upstream call and releases its bytes.

        call: timeout and metadata of the upstream call.
        Raises InvalidRequest, PromptTooLong if the media exceed the whole buffer, PeerContract, and upstream errors.
        """
        check_prompt(prompt)
        prunings = prunings_of(prompt, pruning)
        modalities = modalities_of(prompt)
        upstream = self._encode(prompt, pruning, call) if modalities else self._preprocess(prompt, call)
        try:
            plan = await upstream.plan()
            _check_plan(plan, prompt, self._model)
            # Inline media may be large: only `upstream` keeps the messages, for as long as it may have to retry.
            del prompt, pruning
            if upstream.fetched_ns is None:
                clock.skip(Stage.FETCH)
            else:
                clock.finish(Stage.FETCH, upstream.fetched_ns)
            clock.finish(Stage.PLAN if modalities else Stage.TRANSFER)
            async with AsyncExitStack() as held:
                yield MediaSession(plan, prunings, upstream, self._model, self._room, held)
        finally:
            upstream.cancel()

    def _encode(self, prompt: prompt_pb2.Prompt, pruning: prompt_pb2.Pruning, call: Mapping[str, Any]) -> RetriedCall:
        requests = partial(_encode_requests, prompt, pruning)
        return RetriedCall(self._encoder.Encode, requests, "encoder", self._encoder_retries, **call)

    def _preprocess(self, prompt: prompt_pb2.Prompt, call: Mapping[str, Any]) -> RetriedCall:
        requests = partial(_preprocess_requests, prompt)
        return RetriedCall(
            self._preprocessing.Preprocess, requests, "preprocessing", self._preprocessing_retries, **call
        )


class MediaSession:
    """Plan and media of one request.

    prunings, kept_counts, media_keys: one for each item of the plan; the keys look up encoded media in the cache.
    Raises PromptTooLong if the embeddings of all items together exceed the whole buffer.
    """

    def __init__(
        self,
        plan: PromptPlan,
        prunings: tuple[Pruning, ...],
        upstream: RetriedCall,
        model: ModelInput,
        room: ByteSemaphore,
        held: AsyncExitStack,
    ) -> None:
        self.plan = plan
        self.prunings = prunings
        self.kept_counts = tuple(
            retained_count(item.grid, how, item.modality) for item, how in zip(plan.media, prunings, strict=True)
        )
        self.media_keys = tuple(
            encoded_media_key(item, how, count, plan.fingerprint)
            for item, how, count in zip(plan.media, prunings, self.kept_counts, strict=True)
        )
        self._row_bytes = (1 + model.embed_levels) * model.hidden_size * model.dtype.itemsize
        size_bytes = sum(self.kept_counts) * self._row_bytes
        if size_bytes > room.size_bytes:
            fits = advice(plan.media, prunings, room.size_bytes // self._row_bytes)
            raise PromptTooLong(
                f"the prompt's {len(plan.media)} media keep {sum(self.kept_counts)} tokens, whose embeddings take "
                f"{size_bytes} bytes; --media-buffer-bytes holds {room.size_bytes}{fits}"
            )
        self._upstream = upstream
        self._model = model
        self._room = room
        self._held = held

    async def give_room_back(self) -> None:
        """Releases the reserved bytes before the session ends."""
        await self._held.aclose()

    async def receive(self, wanted: Sequence[int], clock: StageClock) -> AsyncIterator[Progress | MediaItem]:
        """Reserves bytes, selects the wanted items, then yields progress and each item as it completes.

        The session holds the bytes. The progress of an item restarts if its encoder was lost.
        Raises PeerContract for messages that contradict the plan, and upstream errors.
        """
        size_bytes = sum(self.kept_counts[index] for index in wanted) * self._row_bytes
        await self._held.enter_async_context(self._room.reserved(size_bytes))
        self._upstream.select(wanted)
        arriving = self._arriving(wanted)
        self._note_progress(arriving.values(), clock)
        while missing := [index for index, item in arriving.items() if not item.complete]:
            try:
                response = await self._upstream.read()
            except Unavailable as lost:
                await self._upstream.resume(lost, self.plan, missing)
                arriving.update(self._arriving(missing))
                continue
            if response is None:
                raise PeerContract("the encoder's stream ended before every media item was sent")
            event: Progress | MediaItem | None = None
            match response.WhichOneof("response"):
                case "progress":
                    event = _selected(arriving, response.progress.media_index).progress(response.progress)
                case "embeds":
                    item = _selected(arriving, response.embeds.media_index)
                    item.add(response.embeds, clock.now_ns())
                    if item.complete:
                        event = await asyncio.to_thread(item.finish)
                case other:
                    raise PeerContract(f"the encoder sent {other}, expected progress or embeds")
            self._note_progress(arriving.values(), clock)
            if event:
                yield event
        self._upstream.succeeded()

    def _arriving(self, wanted: Sequence[int]) -> dict[int, ArrivingItem]:
        return {
            index: ArrivingItem(index, self.plan.media[index], self.kept_counts[index], self._model) for index in wanted
        }

    def _note_progress(self, arriving: Collection[ArrivingItem], clock: StageClock) -> None:
        """A stage ends when the last item leaves it; a stage that no item passed through is skipped."""
        if arriving and all(item.begun for item in arriving):
            for stage in _STAGES_OF_ITEMS:
                left_ns = [item.left_ns[stage] for item in arriving if stage in item.left_ns]
                if left_ns:
                    clock.finish(stage, max(left_ns))
                else:
                    clock.skip(stage)
        if all(item.complete for item in arriving):
            clock.finish(Stage.TRANSFER)


class ArrivingItem:
    """Assembles one media item from its pieces. Raises PeerContract for a piece that contradicts the plan."""

    def __init__(self, index: int, plan: MediaPlan, count: int, model: ModelInput) -> None:
        self._index = index
        self._plan = plan
        self._shape = (1 + model.embed_levels, count, model.hidden_size)
        self._dtype = model.dtype
        self._device = model.device
        self._buffer: TensorBuffer | None = None
        self._kept: Int32Array | None = None
        self._repaired_frames = 0
        self._progress = Progress(index, 0, 0)
        self.left_ns: dict[Stage, int] = {}  # when the item left each of its stages; empty until the first piece

    @property
    def begun(self) -> bool:
        return self._buffer is not None

    @property
    def complete(self) -> bool:
        return self._buffer is not None and self._buffer.complete

    def progress(self, message: encoder_pb2.MediaProgress) -> Progress:
        decoded, encoded, last = message.decoded_slices, message.encoded_slices, self._progress
        reached = Progress(self._index, decoded, encoded)
        falls = decoded < last.decoded_slices or encoded < last.encoded_slices
        # A repeated message is refused as well: a peer could send it for ever.
        if falls or reached == last or not encoded <= decoded <= self._plan.grid.t:
            raise PeerContract(
                f"progress of item {self._index} ({self._plan.grid.t} slices) went from {last.decoded_slices} decoded "
                f"and {last.encoded_slices} encoded slices to {decoded} and {encoded}"
            )
        self._progress = reached
        return reached

    def add(self, message: encoder_pb2.EmbedsChunk, received_ns: int) -> None:
        """Adds a piece. received_ns: when it was read, on the clock of `left_ns`."""
        if self.complete:
            raise PeerContract(f"item {self._index} was sent twice")
        if self._buffer is None:
            self._kept = self._checked_kept(message)
            if not 0 <= message.repaired_frames <= self._plan.frames:
                raise PeerContract(
                    f"item {self._index}: repaired_frames must be between 0 and {self._plan.frames}, "
                    f"got {message.repaired_frames}"
                )
            self._repaired_frames = message.repaired_frames
            self._note_ages(message.ages, received_ns)
            self._buffer = buffer_for(message.chunk, list(TORCH_DTYPES), self._shape)
        elif message.HasField("kept"):
            raise PeerContract(f"item {self._index}: only the first piece may have kept")
        add_chunk(self._buffer, message.chunk)

    def finish(self) -> MediaItem:
        """The complete item in the model's dtype, pinned for CUDA. Reads all embeddings: call it in a thread."""
        assert self._buffer is not None
        with busy("transfer"):
            sent = torch.frombuffer(self._buffer.data, dtype=TORCH_DTYPES[self._buffer.dtype]).view(self._shape)
            # Checked after the conversion: finite float32 values can overflow float16.
            embeds = sent.to(self._dtype)
            kept = b"" if self._kept is None else self._kept.tobytes()
            digest = tagged_digest(_DIGEST_DOMAIN, (self._buffer.dtype.label.encode(), kept, self._buffer.data))
            if not bool(embeds.isfinite().all()):
                raise PeerContract(f"the embeddings of item {self._index} are not finite in {self._dtype}")
            embeds = pinned_for(embeds, self._device)
        return MediaItem(self._index, self._kept, embeds, self._repaired_frames, digest)

    def _note_ages(self, ages: encoder_pb2.StageAges, received_ns: int) -> None:
        reported = {
            Stage.WAIT_FOR_ENCODER: ages.begun_s,
            Stage.ENCODE: ages.encoded_s,
            Stage.PRUNE: ages.pruned_s,
        }
        if ages.HasField("decoded_s"):
            reported[Stage.DECODE] = ages.decoded_s
        if ages.HasField("resized_s"):
            reported[Stage.RESIZE] = ages.resized_s
        self.left_ns = {stage: from_ago_s(ago_s, received_ns) for stage, ago_s in reported.items()}

    def _checked_kept(self, message: encoder_pb2.EmbedsChunk) -> Int32Array | None:
        count, tokens = self._shape[1], self._plan.grid.tokens
        if message.HasField("kept") != (count < tokens):
            raise PeerContract(
                f"item {self._index} keeps {count} of {tokens} tokens: kept must be sent if and only if tokens are "
                f"dropped"
            )
        if count == tokens:
            return None
        kept = int32_array(message.kept)
        if kept.shape != (count,):
            raise PeerContract(f"item {self._index} must keep {count} tokens, got kept of shape {list(kept.shape)}")
        if kept[0] < 0 or kept[-1] >= tokens or bool((np.diff(kept) <= 0).any()):
            raise PeerContract(f"item {self._index}: kept must increase strictly, from at least 0 to below {tokens}")
        return kept


class RetriedCall:
    """An Encode or Preprocess call that is started again on another replica if it is lost after its first message.

    method: of the service's stub. requests: the messages to write, given the future of the selected items.
    timeout: in seconds, for all attempts together; None for no limit. `cancel` must be called at the end.
    """

    def __init__(
        self,
        method: Callable[..., Call],
        requests: Callable[[Selected], AsyncIterator[Any]],
        stage: str,
        retries: Retries,
        timeout: float | None = None,
        metadata: Any = None,
    ) -> None:
        self._method = method
        self._requests = requests
        self._stage = stage
        self._retries = retries
        self._clock = asyncio.get_running_loop().time
        self._ends_s = None if timeout is None else self._clock() + timeout
        self._metadata = metadata
        self._attempt = 0
        self._answered = False
        self.fetched_ns: int | None = None
        self._start()

    async def plan(self) -> PromptPlan:
        """The prompt's plan. Raises PeerContract, and errors of the service.

        Sets `fetched_ns`, when media given by URL had been fetched, on this host's monotonic clock; None without any.
        """
        while True:
            try:
                return await self._receive_plan()
            except Unavailable as lost:
                await self._restart(lost)

    def select(self, wanted: Sequence[int]) -> None:
        if not self._selected.done():  # cancelled together with a lost call; the next read raises its error
            self._selected.set_result(wanted)

    async def read(self) -> Any:
        """The next message; None at the end of the stream. Raises errors of the service."""
        message = await read_from(self._call, self._stage)
        self._answered = True
        return message

    async def resume(self, lost: Unavailable, plan: PromptPlan, missing: Sequence[int]) -> None:
        """Selects the missing items in a new call. Raises `lost` if no new call can be made or its plan differs."""
        await self._restart(lost)
        again = await self.plan()
        if not again.same_as(plan):
            log.warning("another replica sent a different plan", stage=self._stage)
            raise lost
        self.select(missing)

    def succeeded(self) -> None:
        """Records that everything selected has arrived, so the call will not be retried."""
        self._retries.succeeded()
        del self._requests  # may hold inline media

    def cancel(self) -> None:
        self._call.cancel()
        self._writing.cancel()
        self._selected.cancel()

    def _start(self) -> None:
        timeout = None if self._ends_s is None else max(0.0, self._ends_s - self._clock())
        self._attempt += 1
        self._answered = False
        self._selected: Selected = asyncio.get_running_loop().create_future()
        self._call = self._method(timeout=timeout, metadata=self._metadata)
        self._writing = asyncio.create_task(_write_all(self._call, self._requests(self._selected)))

    async def _restart(self, lost: Unavailable) -> None:
        """Retries only calls that had answered: gRPC itself has already retried the others."""
        # While a call is being written to, gRPC may report UNAVAILABLE where the deadline has passed.
        if self._ends_s is not None and self._clock() >= self._ends_s:
            raise DeadlinePassed(f"the deadline passed while waiting for {self._stage}") from lost
        if not self._answered:
            raise lost
        self.cancel()
        await self._retries.wait(self._attempt + 1, lost)
        log.warning("retrying", stage=lost.stage, error=str(lost), attempt=self._attempt + 1)
        self._start()

    async def _receive_plan(self) -> PromptPlan:
        receiver = PlanReceiver()
        while True:
            response = await self.read()
            if response is None:
                raise PeerContract("the stream ended before its plan was complete")
            if not response.HasField("plan"):
                raise PeerContract("the stream did not begin with a plan")
            if self.fetched_ns is None and response.HasField("fetched_ago_s"):
                self.fetched_ns = from_ago_s(response.fetched_ago_s, monotonic_ns())
            if plan := receiver.add(response.plan):
                return plan


async def _write_all(call: Any, requests: AsyncIterator[Any]) -> None:
    """Writes every request of a call. If the call ends first, reading from it raises its error."""
    async for request in requests:
        await write_to(call, request)
    await end_writing(call)


async def _encode_requests(
    prompt: prompt_pb2.Prompt, pruning: prompt_pb2.Pruning, selected: Selected
) -> AsyncIterator[encoder_pb2.EncodeRequest]:
    """The prompt; then, once bytes are reserved, the selected items."""
    yield encoder_pb2.EncodeRequest(prompt=encoder_pb2.EncodePrompt(prompt=prompt, pruning=pruning))
    for index in await selected:
        yield encoder_pb2.EncodeRequest(select=prompt_pb2.Select(media_index=index))


async def _preprocess_requests(
    prompt: prompt_pb2.Prompt, _: Selected
) -> AsyncIterator[preprocessing_pb2.PreprocessRequest]:
    yield preprocessing_pb2.PreprocessRequest(prompt=prompt)


def _selected(arriving: Mapping[int, ArrivingItem], index: int) -> ArrivingItem:
    if index not in arriving:
        raise PeerContract(f"the encoder sent item {index}, selected are {sorted(arriving)}")
    return arriving[index]


def _check_plan(plan: PromptPlan, prompt: prompt_pb2.Prompt, model: ModelInput) -> None:
    if plan.fingerprint != model.fingerprint:
        raise PeerContract(
            f"the plan was made with checkpoint {plan.fingerprint.hex()[:12]}, this is {model.fingerprint.hex()[:12]}: "
            f"all three services need the same --model"
        )
    modalities, planned = modalities_of(prompt), [item.modality for item in plan.media]
    if planned != modalities:
        raise PeerContract(f"the prompt's media are {modalities}, the plan's {planned}")
    for (name, _, media), item in zip(named_media(prompt), plan.media, strict=True):
        source = media.WhichOneof("source")
        if item.brings_embeds != (source == "embeds"):
            raise PeerContract(f"the source of {name} is {source}, the plan has {item.frames} frames for it")
        if item.brings_embeds and media.embeds.grid != grid_message(item.grid):
            raise PeerContract(f"the embeddings of {name} have another grid than the plan's {item.grid}")
    if plan.embed_levels != model.embed_levels:
        raise PeerContract(f"the plan has embed_levels {plan.embed_levels}, the model {model.embed_levels}")
    if (largest := int(plan.input_ids.max())) >= model.vocab_size:
        raise PeerContract(f"the plan holds token id {largest}, the model's vocabulary has {model.vocab_size} tokens")
