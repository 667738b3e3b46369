"""EncoderService: sends the plan, then the pruned embeddings of selected items, in the order of selection.

    start    reserve output bytes ─▶ join the cache entry ─▶ fill it: reserve encoding bytes, select the item
    obtain                      (a task per item)  slices done ─▶ gather a part, entry complete ─▶ the rest, leave it
    send                                                             in order ─▶ stream ─▶ release output bytes

Output bytes are reserved before an item is selected from preprocessing. The slices of an entry may come from this
request's stream or from another's. It owns the order of messages, and maps CUDA out-of-memory to OVERLOADED.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
import structlog
import torch

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.contract.errors import InvalidRequest, Overloaded
from gridsieve.common.contract.limits import MAX_INLINE_BYTES
from gridsieve.common.contract.plan import PromptPlan
from gridsieve.common.contract.requests import check_prompt, pruning_from, received_pieces, selections
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.common.handover import Receiver, sender_to
from gridsieve.common.security.credentials import NO_CREDENTIALS, Credentials
from gridsieve.common.serving.interceptors import passed_on
from gridsieve.common.yielding import begin_call
from gridsieve.services.encoder.items.cache import EmbedsCache
from gridsieve.services.encoder.items.item import Item
from gridsieve.services.encoder.rpc.messages import BroughtEmbeds, adapter_of, checked_prunings, take_embeds
from gridsieve.services.encoder.rpc.responses import Responses
from gridsieve.services.encoder.upstream.plan_check import PlanCheck
from gridsieve.services.encoder.upstream.stream import PreprocessStream
from gridsieve.v1 import encoder_pb2, encoder_pb2_grpc, preprocessing_pb2_grpc, prompt_pb2
from gridsieve.v1.encoder_pb2 import EncodeRequest, EncodeResponse

SERVICE = encoder_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name

log = structlog.get_logger()

Requests: TypeAlias = AsyncIterator[EncodeRequest]
Context: TypeAlias = grpc.aio.ServicerContext[EncodeRequest, EncodeResponse]


class EncoderServicer(encoder_pb2_grpc.EncoderServiceServicer):
    """Serves the embeddings of `cache`.

    fingerprint: of the checkpoint. output_bytes: limits embeddings that wait to be sent, at least as large as the
    cache's `encoding_bytes`. preprocessing: the channel to it; credentials: the token shown to it. receiver: makes a
    receiver of frames in shared memory for a call of preprocessing, if that may run on this host.
    """

    def __init__(
        self,
        fingerprint: bytes,
        cache: EmbedsCache,
        output_bytes: ByteSemaphore,
        preprocessing: grpc.aio.Channel,
        credentials: Credentials = NO_CREDENTIALS,
        max_inline_bytes: int = MAX_INLINE_BYTES,
        receiver: Callable[[], Receiver | None] = lambda: None,
    ) -> None:
        assert output_bytes.size_bytes >= cache.encoding_bytes.size_bytes
        self._tower = cache.tower
        self._cache = cache
        self._output_bytes = output_bytes
        self._preprocessing: Any = preprocessing_pb2_grpc.PreprocessingServiceStub(preprocessing)
        self._credentials = credentials
        self._max_inline_bytes = max_inline_bytes
        self._receiver = receiver
        tower = self._tower
        self._plan_check = PlanCheck(tower.patches, tower.embed_levels, fingerprint, tower.arrange, tower.sound)

    async def Encode(self, request_iterator: Requests, context: Context) -> AsyncIterator[EncodeResponse]:
        responses = Responses(self._output_bytes)
        # The stream runs without the caller's deadline, since other requests may wait for its slices. The deadline
        # cancels this call, and with it the request's claim to the stream.
        options = {**passed_on(context, self._credentials), "timeout": None}
        task = asyncio.create_task(self._answer(aiter(request_iterator), options, responses))
        # Notices a disconnected caller even while the last response is still being written.
        context.add_done_callback(lambda _: task.cancel())  # type: ignore[arg-type]  # the stub's type is no protocol
        async with aclosing(responses.until_done(task)) as made:
            async for response in made:
                yield response

    async def _answer(self, requests: Requests, options: Mapping[str, Any], responses: Responses) -> None:
        first = await anext(requests, None)
        if first is None or not first.HasField("prompt"):
            raise InvalidRequest("the first request of a stream must be a prompt")
        check_prompt(first.prompt.prompt, self._max_inline_bytes)
        begin_call(first.prompt.prompt.yields)
        prunings, adapter = checked_prunings(first.prompt, self._tower), adapter_of(first, self._tower)
        brought = await asyncio.to_thread(take_embeds, first.prompt.prompt, self._tower)
        call = self._preprocessing.Preprocess(**options)
        stream = PreprocessStream(call, self._plan_check, self._receiver())
        try:
            plan = await stream.plan(first.prompt.prompt, received_pieces(requests, first.prompt.prompt))
            handover = first.handover
            del first  # its media may be large
            await responses.put_plan(plan, stream.fetched_ns)
            with sender_to(handover, "Encode") as responses.sender:
                selected = selections(requests, len(plan.media))
                await self._encode(selected, plan, prunings, adapter, brought, stream, responses)
        except torch.OutOfMemoryError as error:
            log.warning("out of memory on the device", error=str(error))
            raise Overloaded("the encoder's device has no memory left") from error
        finally:
            stream.detach()

    async def _encode(
        self,
        selections: AsyncIterator[tuple[int, prompt_pb2.Select]],
        plan: PromptPlan,
        prunings: tuple[ItemPruning, ...],
        adapter: bytes,
        brought: dict[int, BroughtEmbeds],
        stream: PreprocessStream,
        responses: Responses,
    ) -> None:
        items: list[Item] = []
        started: asyncio.Queue[Item | None] = asyncio.Queue()

        async def select(group: asyncio.TaskGroup) -> None:
            async for index, selected in selections:
                if selected.HasField("pruning"):
                    raise InvalidRequest("is for preprocessing alone", field="select.pruning")
                shares, outputs, media = responses.sender is not None, self._output_bytes, plan.media[index]
                pruning = pruning_from(selected, prunings[index], media)
                item = Item(index, media, pruning, self._cache, outputs, shares, selected.parts, adapter)
                items.append(item)
                await item.start(stream, brought.pop(index).tensor if index in brought else None)
                started.put_nowait(item)
                group.create_task(item.obtain(stream, responses.offer_progress))
            started.put_nowait(None)
            for item in items:
                await item.wait_until_decoded()
            await stream.all_selected()

        async def send() -> None:
            while (item := await started.get()) is not None:
                async for part in item.parts():
                    await responses.put_embeds(item, part)
                item.close()

        try:
            async with asyncio.TaskGroup() as group:
                for step in (select(group), send(), stream.wait_until_finished()):
                    group.create_task(step)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            for item in items:
                item.close()
