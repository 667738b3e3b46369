"""The client of preprocessing and the encoder: receives a prompt's plan, then its media items, into bytes that are
reserved first.

    open ─▶ plan, checked ─▶ reserve bytes for the items that the cache lacks ─▶ select ─▶ pieces ─▶ part, checked

The plan of a prompt without media comes from preprocessing directly. Everything that a peer sends is checked here and
in arriving_item.py; violations raise PeerContract. If an encoder is lost, another one is asked for the items that are
still missing (retried_call.py). This module does not know the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

import grpc

from gridsieve.common.affinity import Affinity, Metadata, media_key
from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.contract.errors import PeerContract, PromptTooLong, Unavailable
from gridsieve.common.contract.limits import MAX_INLINE_BYTES
from gridsieve.common.contract.plan import Modality, PromptPlan
from gridsieve.common.contract.received import check_plan
from gridsieve.common.contract.requests import check_prompt, detach_files, file_pieces
from gridsieve.common.contract.retention import EVS, ItemPruning, num_kept, reference_bytes
from gridsieve.common.contract.wire import prunings_of
from gridsieve.common.handover import Receiver
from gridsieve.common.retries import Retries
from gridsieve.services.generation.request.encoded_media import MediaItem
from gridsieve.services.generation.request.encoded_media_cache import encoded_media_key
from gridsieve.services.generation.request.prompt_limit import Limit, advice
from gridsieve.services.generation.request.request import Adapter
from gridsieve.services.generation.stage_clock import Stage, StageClock
from gridsieve.services.generation.upstream.arriving_item import ArrivingItem, ModelInput, Progress
from gridsieve.services.generation.upstream.retried_call import RetriedCall, Selected
from gridsieve.services.generation.upstream.watch import Watch
from gridsieve.v1 import encoder_pb2, preprocessing_pb2, prompt_pb2
from gridsieve.v1.encoder_pb2_grpc import EncoderServiceStub
from gridsieve.v1.preprocessing_pb2_grpc import PreprocessingServiceStub

_STAGES_OF_ITEMS = (Stage.DECODE, Stage.RESIZE, Stage.WAIT_FOR_ENCODER, Stage.ENCODE, Stage.PRUNE)


class MediaClient:
    """Opens a `MediaCall` for each request. All of them reserve bytes from the same semaphore."""

    def __init__(
        self,
        preprocessing: grpc.aio.Channel,
        encoder: grpc.aio.Channel,
        model: ModelInput,
        media_buffer: ByteSemaphore,
        max_inline_bytes: int = MAX_INLINE_BYTES,
        receiver: Callable[[], Receiver | None] = lambda: None,
        in_parts: bool = False,
        usual_method: str = EVS,
    ) -> None:
        """receiver: makes a receiver of embeddings in shared memory for a call, if the encoder may run on this host.

        in_parts: whether the encoder may send an item in parts, as its slices are encoded. usual_method: of a rate
        without a method, here and in the encoder.
        """
        self._preprocessing = PreprocessingServiceStub(preprocessing)
        self._encoder = EncoderServiceStub(encoder)
        self._model = model
        self._media_buffer = media_buffer
        self._max_inline_bytes = max_inline_bytes
        self._receiver = receiver
        self._in_parts = in_parts
        self._usual_method = usual_method
        self._preprocessing_retries = Retries("preprocessing")
        self._encoder_retries = Retries("encoder", by_media=True)
        self._encoder_affinity = Affinity()

    @asynccontextmanager
    async def open(
        self,
        prompt: prompt_pb2.Prompt,
        pruning: prompt_pb2.Pruning,
        clock: StageClock,
        adapter: Adapter | None = None,
        timeout: float | None = None,
        metadata: Metadata = (),
        first_slice: int = 0,
        reference: bytes = b"",
        replica: str | None = None,
        files: Sequence[bytes | bytearray] = (),
    ) -> AsyncIterator[MediaCall]:
        """A call that has received its plan. Leaving it cancels the upstream call and releases its bytes.

        pruning: a message of its own: a field of the request would keep all of it alive. adapter: with which the
        media are encoded, if it has a part for the tower.
        timeout, metadata: of the upstream call. first_slice, reference: of the media that are selected, see `Select`.
        replica: calls with the same one prefer the same replica; default: those about the same first media item. files:
        those that the prompt announces by their sizes, in order; the larger ones of other prompts are detached from it.
        Raises InvalidRequest, PromptTooLong if the media exceed the whole buffer, PeerContract, and upstream errors.
        """
        adapter = adapter if adapter and adapter.in_tower else None
        # Files may be large: only `upstream` keeps them, for as long as it may have to retry.
        if not files:
            prompt, files = detach_files(prompt)
        check_prompt(prompt, self._max_inline_bytes)
        asked = prunings_of(prompt, pruning, self._usual_method)
        prunings = tuple(replace(each, first_slice=first_slice) for each in asked)
        select = prompt_pb2.Select(first_slice=first_slice, reference=reference, parts=self._in_parts)
        requests = partial(_encode_requests, prompt, files, pruning, select, adapter)
        with (
            self._encoder_affinity.of(replica or media_key(prompt, files)) as same_encoder,
            RetriedCall(
                self._encoder.Encode,
                requests,
                self._encoder_retries,
                timeout,
                (*metadata, *same_encoder),
                self._receiver,
            )
            if prunings
            else self._preprocess_call(prompt, timeout, metadata) as upstream,
        ):
            del files, requests
            plan = await self._received_plan(upstream, prompt)
            del prompt, pruning
            if upstream.fetched_ns is None:
                clock.skip(Stage.FETCH)
            else:
                clock.finish(Stage.FETCH, upstream.fetched_ns)
            clock.finish(Stage.PLAN if prunings else Stage.TRANSFER)
            async with AsyncExitStack() as held:
                yield MediaCall(plan, prunings, adapter, upstream, clock, self._model, self._media_buffer, held)

    async def plan(
        self, prompt: prompt_pb2.Prompt, timeout: float | None = None, metadata: Metadata = ()
    ) -> PromptPlan:
        """The plan of a prompt whose media are not wanted, by preprocessing alone.

        Raises InvalidRequest, PeerContract, and errors of preprocessing.
        """
        check_prompt(prompt, self._max_inline_bytes)
        with self._preprocess_call(prompt, timeout, metadata) as upstream:
            plan = await self._received_plan(upstream, prompt)
            upstream.succeeded()
            return plan

    async def _received_plan(self, upstream: RetriedCall, prompt: prompt_pb2.Prompt) -> PromptPlan:
        plan = await upstream.plan()
        check_plan(plan, prompt, self._model.fingerprint, self._model.embed_levels)
        if (largest := int(plan.input_ids.max())) >= self._model.vocab_size:
            raise PeerContract(
                f"the plan holds token id {largest}, the model's vocabulary has {self._model.vocab_size} tokens"
            )
        return plan

    def watch(self, fps: float, url: str, timeout: float | None = None, metadata: Metadata = ()) -> Watch:
        """A call that watches a stream, which the URL names, or whose bytes are sent (an empty URL)."""
        return Watch(self._preprocessing.Watch(timeout=timeout, metadata=metadata), fps, url)

    def _preprocess_call(self, prompt: prompt_pb2.Prompt, timeout: float | None, metadata: Metadata) -> RetriedCall:
        requests = partial(_preprocess_requests, prompt)
        return RetriedCall(self._preprocessing.Preprocess, requests, self._preprocessing_retries, timeout, metadata)


class MediaCall:
    """Plan and media of one request.

    prunings, num_kept, bounded, media_keys: one for each item of the plan. bounded: whether num_kept is a bound. The
    keys look up encoded media in the cache.
    Raises PromptTooLong if the embeddings of all items together exceed the whole buffer.
    """

    def __init__(
        self,
        plan: PromptPlan,
        prunings: tuple[ItemPruning, ...],
        adapter: Adapter | None,
        upstream: RetriedCall,
        clock: StageClock,
        model: ModelInput,
        media_buffer: ByteSemaphore,
        held: AsyncExitStack,
    ) -> None:
        self.plan = plan
        self.prunings = prunings
        self.num_kept = tuple(
            num_kept(item.grid, how, item.modality) for item, how in zip(plan.media, prunings, strict=True)
        )
        self.bounded = tuple(
            how.threshold is not None and item.modality is Modality.VIDEO
            for item, how in zip(plan.media, prunings, strict=True)
        )
        self.media_keys = tuple(
            encoded_media_key(item, how, count, plan.fingerprint, adapter.digest if adapter else b"")
            for item, how, count in zip(plan.media, prunings, self.num_kept, strict=True)
        )
        self._row_bytes = (1 + model.embed_levels) * model.hidden_size * model.dtype.itemsize
        size_bytes = sum(self.num_kept) * self._row_bytes
        if size_bytes > media_buffer.size_bytes:
            raise PromptTooLong(
                f"the prompt's {len(plan.media)} media keep {sum(self.num_kept)} tokens, whose embeddings take "
                f"{size_bytes} bytes; --media-buffer-bytes holds {media_buffer.size_bytes}",
                value=size_bytes,
                limit=media_buffer.size_bytes,
                remedy=advice(plan.media, [Limit(prunings, media_buffer.size_bytes // self._row_bytes)]),
            )
        self._upstream, self._clock = upstream, clock
        self._model = model
        self._media_buffer = media_buffer
        self._held = held

    async def release(self) -> None:
        """Releases the reserved bytes before the call ends."""
        await self._held.aclose()

    async def receive(self, wanted: Sequence[int]) -> AsyncIterator[Progress | MediaItem]:
        """Reserves bytes, selects the wanted items, then yields progress, and each item as it completes or grows.

        The call holds the bytes. The progress of an item restarts if its encoder was lost.
        Raises PeerContract for messages that contradict the plan, and upstream errors.
        """
        size_bytes = sum(self.num_kept[index] for index in wanted) * self._row_bytes
        await self._held.enter_async_context(self._media_buffer.reserved(size_bytes))
        self._upstream.select(wanted)
        arriving = {
            index: ArrivingItem(
                index,
                self.plan.media[index],
                self.num_kept[index],
                self._model,
                self._least(index),
                reference_bytes(self.plan.media[index].grid) if self.prunings[index].first_slice else 0,
            )
            for index in wanted
        }
        self._note_progress(arriving.values())
        while missing := [index for index, item in arriving.items() if not item.complete]:
            try:
                response = await self._upstream.read()
            except Unavailable as lost:
                await self._upstream.resume(lost, self.plan, missing)
                arriving.update({index: arriving[index].resumed() for index in missing})
                continue
            if response is None:
                raise PeerContract("the encoder's stream ended before every media item was sent")
            event: Progress | MediaItem | None = None
            match response.WhichOneof("response"):
                case "progress":
                    event = _selected(arriving, response.progress.media_index).progress(response.progress)
                case "embeds":
                    item = _selected(arriving, response.embeds.media_index)
                    item.take_piece(response.embeds, self._clock.now_ns(), self._upstream.take)
                    if item.part_complete:
                        event = await asyncio.to_thread(item.finish)
                case other:
                    raise PeerContract(f"the encoder sent {other}, expected progress or embeds")
            self._note_progress(arriving.values())
            if event:
                yield event
        self._upstream.succeeded()

    def _least(self, index: int) -> int | None:
        """How many tokens of an item are kept at least, if `num_kept` is a bound."""
        if not self.bounded[index]:
            return None
        return 0 if self.prunings[index].first_slice else 1

    def _note_progress(self, arriving: Collection[ArrivingItem]) -> None:
        """A stage ends when the last item leaves it; a stage that no item passed through is skipped."""
        if arriving and all(item.begun for item in arriving):
            for stage in _STAGES_OF_ITEMS:
                left_ns = [item.left_ns[stage] for item in arriving if stage in item.left_ns]
                if left_ns:
                    self._clock.finish(stage, max(left_ns))
                else:
                    self._clock.skip(stage)
        if all(item.complete for item in arriving):
            self._clock.finish(Stage.TRANSFER)


async def _encode_requests(
    prompt: prompt_pb2.Prompt,
    files: Sequence[bytes | bytearray],
    pruning: prompt_pb2.Pruning,
    select: prompt_pb2.Select,
    adapter: Adapter | None,
    selected: Selected,
    handover: bytes,
) -> AsyncIterator[encoder_pb2.EncodeRequest]:
    """The prompt and its files; then, once bytes are reserved, the selected items."""
    first = encoder_pb2.EncodePrompt(prompt=prompt, pruning=pruning)
    name, digest = (adapter.name, adapter.digest) if adapter else (None, b"")
    yield encoder_pb2.EncodeRequest(prompt=first, handover=handover, adapter=name, adapter_digest=digest)
    for piece in file_pieces(files):
        yield encoder_pb2.EncodeRequest(file={"data": piece})
    for index in await selected:
        select.media_index = index
        yield encoder_pb2.EncodeRequest(select=select)


async def _preprocess_requests(
    prompt: prompt_pb2.Prompt, _: Selected, handover: bytes
) -> AsyncIterator[preprocessing_pb2.PreprocessRequest]:
    yield preprocessing_pb2.PreprocessRequest(prompt=prompt)


def _selected(arriving: Mapping[int, ArrivingItem], index: int) -> ArrivingItem:
    if index not in arriving:
        raise PeerContract(f"the encoder sent item {index}, selected are {sorted(arriving)}")
    return arriving[index]
