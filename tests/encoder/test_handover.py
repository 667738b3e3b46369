"""Frames and embeddings in shared memory at the encoder's doors; the socket itself is tested in tests/common."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

import pytest
import torch

from gridsieve.common import response_queue
from gridsieve.common.contract import errors
from gridsieve.common.handover import Receiver
from gridsieve.common.sealed_memory import SealedMemory
from gridsieve.services.encoder.items.item import in_shared_memory
from gridsieve.v1.encoder_pb2 import EncodeRequest, EncodeResponse
from tests.common.loopback import TIMEOUT_S, eventually
from tests.encoder.encoder_peers import VIDEO, video
from tests.encoder.encoder_service import SELECT_ALL, Stack, embeds_in, first_request, item_bytes, read_all
from tests.sealed_memory import memory_of, unsealed


def asking(address: bytes, rate: float = 0.5, *contents: int) -> EncodeRequest:
    request = first_request([video(content) for content in contents or (1,)], rate)
    request.handover = address
    return request


async def test_frames_handed_over_are_encoded_like_frames_in_messages(stack: Stack) -> None:
    sent = embeds_in(await stack.encode(first_request([VIDEO, video(7)], 0.5), SELECT_ALL))
    stack.cache.size_bytes = 0
    await stack.check_idle()
    stack.cache._entries.clear()
    stack.preprocessing.hand_over = memory_of
    assert embeds_in(await stack.encode(first_request([VIDEO, video(7)], 0.5), SELECT_ALL)) == sent
    assert stack.preprocessing.selected == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "make",
    [unsealed, lambda content: memory_of(content[1:]), lambda content: memory_of(content + b"!")],
    ids=["unsealed", "too small", "too large"],
)
async def test_frames_in_memory_that_could_change_or_has_another_size_break_the_contract(
    stack: Stack, make: Callable[[bytes], SealedMemory]
) -> None:
    stack.preprocessing.hand_over = make
    with pytest.raises(errors.PeerContract):
        await stack.encode(first_request([VIDEO]), SELECT_ALL)
    stack.preprocessing.hand_over = None
    await stack.check_served()


async def test_frames_that_are_announced_and_not_handed_over_break_the_contract(stack: Stack) -> None:
    def bend(messages: list[EncodeResponse]) -> list[EncodeResponse]:
        for each in messages:
            each.frames.chunk.data, each.frames.chunk.shared = b"", True
        return messages

    stack.preprocessing.bend_frames = bend  # type: ignore[assignment]
    with pytest.raises(errors.PeerContract):
        await stack.encode(first_request([VIDEO]), SELECT_ALL)
    await stack.check_served()


@pytest.mark.parametrize("rate", [0.0, 0.5])
async def test_embeddings_handed_over_equal_those_in_messages_and_are_held_until_they_are_taken(
    stack: Stack, rate: float
) -> None:
    sent = embeds_in(await stack.encode(asking(b"", rate, 1, 2), SELECT_ALL))
    await stack.check_idle()
    receiver = Receiver()
    received = []
    async for response in stack.stub.Encode(iter([asking(receiver.address, rate, 1, 2), SELECT_ALL])):
        if response.HasField("embeds"):
            chunk = response.embeds.chunk
            assert (chunk.shared, chunk.data, chunk.offset_bytes) == (True, b"", 0)
            await asyncio.sleep(0.05)
            item = sent[response.embeds.media_index]
            later = 1 - response.embeds.media_index
            assert stack.output_bytes.held_bytes == (1 + later) * len(item.data)
            chunk.data = receiver.take(len(item.data)).tobytes()
        received.append(response)
    receiver.close()
    assert embeds_in(received) == sent
    await stack.check_idle()


async def test_a_caller_that_cannot_be_reached_gets_messages(stack: Stack) -> None:
    sent = embeds_in(await stack.encode(asking(b""), SELECT_ALL))
    assert embeds_in(await stack.encode(asking(secrets.token_bytes(32)), SELECT_ALL)) == sent
    with pytest.raises(errors.InvalidRequest, match="handover must have 32 bytes, got 3"):
        await stack.encode(asking(b"abc"), SELECT_ALL)


async def test_a_caller_that_takes_nothing_is_refused_once_others_wait_for_its_room(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_queue, "_UNREAD_S", 0.05)
    receiver = Receiver()
    call = stack.stub.Encode(iter([asking(receiver.address, 0.0), SELECT_ALL]), timeout=TIMEOUT_S)
    reading = asyncio.create_task(read_all(call))
    await eventually(lambda: stack.output_bytes.held_bytes == item_bytes(stack.tower))
    await asyncio.sleep(0.2)
    assert not reading.done()
    waiting = asyncio.create_task(stack.output_bytes.reserve(stack.output_bytes.size_bytes))
    with pytest.raises(errors.Overloaded, match="the caller has read nothing"):
        await reading
    await waiting
    stack.output_bytes.release(stack.output_bytes.size_bytes)
    receiver.close()
    await stack.check_served()


async def test_embeddings_have_the_name_of_their_encoding(stack: Stack) -> None:
    def names(received: list[EncodeResponse]) -> list[bytes]:
        return [each.embeds.encoding for each in received if each.embeds.encoding]

    once, again, other = [names(await stack.encode(asking(b"", 0.5, content), SELECT_ALL)) for content in (1, 1, 2)]
    assert once == again != other
    assert [len(each) for each in (*once, *other)] == [32, 32]
    stack.cache.size_bytes = 0
    made_again = [names(await stack.encode(asking(b"", 0.5, 3), SELECT_ALL)) for _ in range(2)]
    assert made_again[0] != made_again[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pruned", [True, False])
def test_kept_rows_of_several_blocks_are_written_in_order(dtype: torch.dtype, pruned: bool) -> None:
    embeds = torch.randn(2, 1777, 768, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept = torch.arange(0, 1777, 2, dtype=torch.int32) if pruned else None
    expected = embeds[:, ::2] if pruned else embeds
    memory = in_shared_memory(embeds, kept)
    assert memory is not None
    content = torch.frombuffer(memory.mapped(expected.nbytes, min_bytes=expected.nbytes).data, dtype=dtype)
    assert torch.equal(content.view(expected.shape), expected)
