"""The encoder's client: a prompt's plan, then its media, item by item, into room that is reserved first.

    open ─▶ plan, checked ─▶ room for all that the cache lacks ─▶ select ─▶ pieces ─▶ item, checked ─▶ the engine

Prompts without media have no use for the encoder: preprocessing is asked for their plan itself. Everything that a peer
sends is checked here and breaks off with PeerContract. What a lost encoder has not sent is asked of another, and what
has been sent is not asked for again. It knows no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import grpc

from common.byte_semaphore import ByteSemaphore
from common.contract.errors import PeerContract, PromptTooLong, Unavailable
from common.contract.plan import PromptPlan
from common.contract.requests import check_prompt
from common.contract.retention import Pruning, retained_count
from common.contract.wire import grid_message, modalities_of, named_media, prunings_of
from common.serving.retries import Retries
from framesieve.v1 import encoder_pb2, preprocessing_pb2, prompt_pb2
from framesieve.v1.encoder_pb2_grpc import EncoderServiceStub
from framesieve.v1.preprocessing_pb2_grpc import PreprocessingServiceStub
from services.generation.kv_cache.encoded_media import answer_key
from services.generation.request.encoded_media import MediaItem
from services.generation.rpc.arrivals import Arrival, ModelInput, Progress
from services.generation.rpc.prompt_limit import advice
from services.generation.rpc.timing import Stage, StageClock
from services.generation.rpc.upstream import Selected, Upstream

_STAGES_OF_ITEMS = (Stage.DECODE, Stage.RESIZE, Stage.WAIT_FOR_ENCODER, Stage.ENCODE, Stage.PRUNE)


class MediaClient:
    """Opens a session for each request. Room is shared by all of them."""

    def __init__(
        self, preprocessing: grpc.aio.Channel, encoder: grpc.aio.Channel, model: ModelInput, room: ByteSemaphore
    ) -> None:
        self._preprocessing = PreprocessingServiceStub(preprocessing)
        self._encoder = EncoderServiceStub(encoder)
        self._model = model
        self._room = room
        self._planning = Retries("preprocessing")
        self._encoding = Retries("encoder")

    @asynccontextmanager
    async def open(
        self, prompt: prompt_pb2.Prompt, pruning: prompt_pb2.Pruning, clock: StageClock, **call: Any
    ) -> AsyncIterator[MediaSession]:
        """A session whose plan is there. Leaving it cancels what is left of it upstream, and gives its room back.

        call: deadline and metadata for the upstream call.
        Raises InvalidRequest, PromptTooLong where the media can never be held together, PeerContract, and what upstream
        raises.
        """
        check_prompt(prompt)
        prunings = prunings_of(prompt, pruning)
        modalities = modalities_of(prompt)
        upstream = self._encode(prompt, pruning, call) if modalities else self._preprocess(prompt, call)
        try:
            plan = await upstream.plan()
            _check_plan(plan, prompt, self._model)
            del prompt, pruning  # media may be in them: only `upstream` keeps these, for as long as it may begin anew
            if upstream.fetched_ns is None:
                clock.skip(Stage.FETCH)
            else:
                clock.finish(Stage.FETCH, upstream.fetched_ns)
            clock.finish(Stage.PLAN if modalities else Stage.TRANSFER)
            async with AsyncExitStack() as held:
                yield MediaSession(plan, prunings, upstream, self._model, self._room, held)
        finally:
            upstream.cancel()

    def _encode(self, prompt: prompt_pb2.Prompt, pruning: prompt_pb2.Pruning, call: Mapping[str, Any]) -> Upstream:
        requests = partial(_encode_requests, prompt, pruning)
        return Upstream(self._encoder.Encode, requests, "encoder", self._encoding, **call)

    def _preprocess(self, prompt: prompt_pb2.Prompt, call: Mapping[str, Any]) -> Upstream:
        requests = partial(_preprocess_requests, prompt)
        return Upstream(self._preprocessing.Preprocess, requests, "preprocessing", self._planning, **call)


class MediaSession:
    """One request's plan and media.

    prunings, kept_counts, answer_keys: one for each item of the plan; the last is what its answer is remembered by.
    Raises PromptTooLong if the embeddings of all items can never be held together.
    """

    def __init__(
        self,
        plan: PromptPlan,
        prunings: tuple[Pruning, ...],
        upstream: Upstream,
        model: ModelInput,
        room: ByteSemaphore,
        held: AsyncExitStack,
    ) -> None:
        self.plan = plan
        self.prunings = prunings
        self.kept_counts = tuple(
            retained_count(item.grid, how, item.modality) for item, how in zip(plan.media, prunings, strict=True)
        )
        self.answer_keys = tuple(
            answer_key(item, how, count, plan.fingerprint)
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
        """Once the media are no longer needed; else leaving the session does it."""
        await self._held.aclose()

    async def receive(self, wanted: Sequence[int], clock: StageClock) -> AsyncIterator[Progress | MediaItem]:
        """Waits for room, then yields the items that are wanted as they complete, and progress before.

        Of an item whose encoder was lost, progress begins anew. The room is the session's.
        Raises PeerContract for what does not fit the plan, and what upstream raises.
        """
        size_bytes = sum(self.kept_counts[index] for index in wanted) * self._row_bytes
        await self._held.enter_async_context(self._room.reserved(size_bytes))
        self._upstream.select(wanted)
        arrivals = self._arrivals(wanted)
        self._note_progress(arrivals.values(), clock)
        while missing := [index for index, arrival in arrivals.items() if not arrival.complete]:
            try:
                response = await self._upstream.read()
            except Unavailable as lost:
                await self._upstream.resume(lost, self.plan, missing)
                arrivals.update(self._arrivals(missing))
                continue
            if response is None:
                raise PeerContract("the encoder's stream ended before every media item was sent")
            event: Progress | MediaItem | None = None
            match response.WhichOneof("response"):
                case "progress":
                    event = _arrival(arrivals, response.progress.media_index).progress(response.progress)
                case "embeds":
                    arrival = _arrival(arrivals, response.embeds.media_index)
                    arrival.add(response.embeds, clock.now_ns())
                    if arrival.complete:
                        event = await asyncio.to_thread(arrival.item)
                case other:
                    raise PeerContract(f"the encoder sent {other} where progress or embeddings were due")
            self._note_progress(arrivals.values(), clock)
            if event:
                yield event
        self._upstream.succeeded()

    def _arrivals(self, wanted: Sequence[int]) -> dict[int, Arrival]:
        return {index: Arrival(index, self.plan.media[index], self.kept_counts[index], self._model) for index in wanted}

    def _note_progress(self, arrivals: Collection[Arrival], clock: StageClock) -> None:
        """A stage that no item went through was finished as soon as those before it."""
        if arrivals and all(arrival.begun for arrival in arrivals):
            for stage in _STAGES_OF_ITEMS:
                left_ns = [arrival.left_ns[stage] for arrival in arrivals if stage in arrival.left_ns]
                if left_ns:
                    clock.finish(stage, max(left_ns))
                else:
                    clock.skip(stage)
        if all(arrival.complete for arrival in arrivals):
            clock.finish(Stage.TRANSFER)


def _arrival(arrivals: Mapping[int, Arrival], index: int) -> Arrival:
    if index not in arrivals:
        raise PeerContract(f"the encoder sent item {index}, {sorted(arrivals)} are selected")
    return arrivals[index]


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
            raise PeerContract(f"{name} brings its {source}, the plan has {item.frames} frames of it")
        if item.brings_embeds and media.embeds.grid != grid_message(item.grid):
            raise PeerContract(f"{name} brings embeddings of another grid than the plan's {item.grid}")
    if plan.embed_levels != model.embed_levels:
        raise PeerContract(f"the plan has {plan.embed_levels} embed_levels, the model {model.embed_levels}")
    if (largest := int(plan.input_ids.max())) >= model.vocab_size:
        raise PeerContract(f"the plan holds token {largest}, the model knows {model.vocab_size}")


async def _encode_requests(
    prompt: prompt_pb2.Prompt, pruning: prompt_pb2.Pruning, selected: Selected
) -> AsyncIterator[encoder_pb2.EncodeRequest]:
    """The prompt; then, once there is room, the items that are wanted."""
    yield encoder_pb2.EncodeRequest(prompt=encoder_pb2.EncodePrompt(prompt=prompt, pruning=pruning))
    for index in await selected:
        yield encoder_pb2.EncodeRequest(select=prompt_pb2.Select(media_index=index))


async def _preprocess_requests(
    prompt: prompt_pb2.Prompt, _: Selected
) -> AsyncIterator[preprocessing_pb2.PreprocessRequest]:
    yield preprocessing_pb2.PreprocessRequest(prompt=prompt)
