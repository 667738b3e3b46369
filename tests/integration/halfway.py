"""A proxy of an encoder that sends half of an item and then waits, which holds a request in transfer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from gridsieve.common.channels import MAX_RECEIVE_BYTES, MAX_RESPONSE_BYTES, REQUEST_ID_KEY
from gridsieve.v1.encoder_pb2 import EmbedsChunk, EncodeRequest, EncodeResponse
from tests.common.loopback import speaking

ENCODE = "/gridsieve.v1.EncoderService/Encode"


class Halfway:
    """Forwards calls to a real encoder. Of the first embeddings it sends half and waits for `release`.

    calls: how many are running. holds: whether it has sent that half.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.calls = 0
        self.holds = False
        self._encode: Any = channel.stream_stream(ENCODE)
        self._released = asyncio.Event()

    def release(self) -> None:
        self._released.set()

    async def passed_on(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        request_id = str(dict(context.invocation_metadata())[REQUEST_ID_KEY])
        call = self._encode(
            _without_handover(requests), timeout=context.time_remaining(), metadata=((REQUEST_ID_KEY, request_id),)
        )
        self.calls += 1
        try:
            async for sent in call:
                answer = EncodeResponse.FromString(sent)
                if self.holds or not answer.HasField("embeds"):
                    yield sent
                    continue
                chunk = answer.embeds.chunk
                rest = EncodeResponse(embeds=EmbedsChunk(media_index=answer.embeds.media_index, chunk=chunk))
                middle = rest.embeds.chunk.offset_bytes = len(chunk.data) // 2
                chunk.data, rest.embeds.chunk.data = chunk.data[:middle], chunk.data[middle:]
                yield answer.SerializeToString()
                self.holds = True
                await self._released.wait()
                yield rest.SerializeToString()
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata()))
        finally:
            self.calls -= 1
            call.cancel()


async def _without_handover(requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """So that embeddings come in messages, which can be halved."""
    async for sent in requests:
        request = EncodeRequest.FromString(sent)
        request.ClearField("handover")
        yield request.SerializeToString()


@asynccontextmanager
async def halfway(address: str, encoder: str) -> AsyncIterator[Halfway]:
    """Serves at `address` for the encoder at the other one. On exit all its calls break, as if it were killed."""
    options = [("grpc.max_receive_message_length", MAX_RESPONSE_BYTES)]
    async with grpc.aio.insecure_channel(encoder, options=options) as channel:
        replica = Halfway(channel)
        listening = [("grpc.max_receive_message_length", MAX_RECEIVE_BYTES)]
        async with speaking(address, {ENCODE: replica.passed_on}, listening):
            yield replica
