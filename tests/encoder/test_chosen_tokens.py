"""The encoder over a real socket where tokens are chosen before the tower: answers, bytes, and lies about `kept`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import Tensor

from gridsieve.common.contract import errors
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.common.contract.tensors import DType
from gridsieve.common.contract.wire import add_chunk, buffer_for, int32_array, int32_tensor
from gridsieve.services.encoder.items.cache_entry import CacheEntry
from gridsieve.services.encoder.items.decoded_slices import FrameSlice
from gridsieve.services.encoder.items.pending_entry import PendingEntry
from gridsieve.services.encoder.tower.patches import KeptFrames
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.v1 import prompt_pb2, tensor_pb2
from gridsieve.v1.encoder_pb2 import EncodeRequest
from gridsieve.v1.preprocessing_pb2 import PreprocessResponse
from tests.encoder.encoder_peers import (
    GRID,
    IMAGE,
    Media,
    chosen,
    frames_of,
    item_messages,
    plan_of,
    slice_messages,
    squares,
    video,
)
from tests.encoder.encoder_service import SELECT_ALL, Stack, embeds_in, first_request, item_bytes, metric, read_all
from tests.encoder.test_sharing import fail_once, waiters

SLICE = GRID.h * GRID.w
# Of 4 slices of 6 tokens, 15 are kept: the first and half of every other. With a threshold, the fake keeps none of the
# second.
RATE, HALF, SPARSE = 0.375, SLICE + 3 * 3, SLICE + 2 * 3


def pruned(rate: float = RATE, threshold: float | None = None) -> prompt_pb2.Pruning:
    return prompt_pb2.Pruning(rate=rate, method="pixel_change", threshold=threshold)


def asking(media: Sequence[Media], pruning: prompt_pb2.Pruning) -> EncodeRequest:
    request = first_request(media)
    request.prompt.pruning.CopyFrom(pruning)
    return request


def expected(tower: Tower, media_index: int, media: Media, pruning: prompt_pb2.Pruning) -> tuple[list[int], Tensor]:
    """The kept tokens of the grid, and the tower's embeddings of them."""
    frames, grid = frames_of(media_index, media, tower.patches), media.grid
    kept, embeds = [], []
    for number in range(grid.t):
        tokens, step = chosen(grid, number, pruning), tower.patches.temporal_patch
        kept += [number * grid.h * grid.w + token for token in tokens]
        if tokens:
            pixels = squares(frames[number * step : (number + 1) * step], tokens, tower.patches.token_px)
            embeds += tower.encode([KeptFrames(torch.from_numpy(pixels), (grid.h, grid.w), tuple(tokens))])
    return kept, torch.cat(embeds, dim=1)


@pytest.mark.parametrize("threshold", [None, 0.1])
async def test_chosen_tokens_are_encoded_sent_and_cached_alone(stack: Stack, threshold: float | None) -> None:
    media, pruning, count = [video(7), IMAGE], pruned(threshold=threshold), HALF if threshold is None else SPARSE
    tokens = metric("batch_tokens_sum")
    for _ in range(2):
        received = embeds_in(await stack.encode(asking(media, pruning), SELECT_ALL))
        kept, embeds = expected(stack.tower, 0, media[0], pruning)
        assert (received[0].kept, len(kept)) == (kept, count)
        np.testing.assert_allclose(received[0].embeds, embeds.numpy(), atol=2e-6)
        assert received[1].kept is None
        await stack.check_idle()
    assert metric("batch_tokens_sum") - tokens == count + IMAGE.grid.tokens
    assert stack.preprocessing.selected == [0, 1]
    image_bytes = item_bytes(stack.tower, IMAGE.grid.tokens) + 20 * IMAGE.grid.tokens
    assert stack.cache.held_bytes == item_bytes(stack.tower, count) + image_bytes
    (entry,) = (each for each in stack.cache._entries.values() if each.kept is not None)
    assert entry.embeds.untyped_storage().nbytes() == item_bytes(stack.tower, count)


async def test_a_clip_has_an_entry_for_each_choice_and_one_for_all_its_tokens(stack: Stack) -> None:
    """Rates that keep equally many tokens share one. Methods after the tower take the entry of all tokens."""
    own = [pruned(0.5), pruned(RATE, 0.1), pruned(0.5, 0.2), pruned(0.25, 0.1), pruned(0.51), prompt_pb2.Pruning()]
    for pruning in (*own, pruned(0.52), pruned(0), prompt_pb2.Pruning(rate=0.5)):
        await stack.encode(asking([video(7)], pruning), SELECT_ALL)
    assert len(stack.preprocessing.selected) == len(own)


async def test_a_video_of_which_all_tokens_changed_enough_is_whole(stack: Stack) -> None:
    """With a threshold alone, all tokens may be kept. `kept` is then not sent."""
    stack.preprocessing.bend_frames = lambda messages: whole(range(GRID.t))
    received = embeds_in(await stack.encode(asking([video(7)], pruned(0, 0.1)), SELECT_ALL))
    assert received[0].kept is None
    assert received[0].shape[1] == GRID.tokens


def whole(numbers: Sequence[int]) -> list[PreprocessResponse]:
    """Slices of which all tokens are sent."""
    return [message for number in numbers for message in of_slice(number, range(SLICE))]


def of_slice(number: int, kept: Sequence[int]) -> list[PreprocessResponse]:
    pixels = np.zeros((2, len(kept) * PX, PX, 3), np.uint8)
    return slice_messages(0, 2 * number, pixels, kept=kept)


PX = 32


@pytest.mark.parametrize("threshold", [None, 0.1])
async def test_after_an_error_of_the_stream_a_waiter_goes_on_with_the_chosen_tokens(
    stack: Stack, threshold: float | None
) -> None:
    pruning = pruned(threshold=threshold)
    stack.preprocessing.stall = True
    calls = [stack.stub.Encode(iter([asking([video(7)], pruning), SELECT_ALL])) for _ in range(2)]
    await waiters(2)
    await stack.preprocessing.stalled.wait()
    stack.preprocessing.stall = False
    fail_once(stack.preprocessing, errors.Unavailable("preprocessing is draining", "preprocessing"))
    tokens = metric("batch_tokens_sum")
    stack.preprocessing.resumed.set()
    answers = []
    for call in calls:
        with suppress(errors.Unavailable):
            answers.append(embeds_in(await read_all(call)))
    kept, embeds = expected(stack.tower, 0, video(7), pruning)
    ((received,),) = (answer.values() for answer in answers)
    assert received.kept == kept
    np.testing.assert_allclose(received.embeds, embeds.numpy(), atol=2e-6)
    assert stack.preprocessing.selected == [0, 0]
    assert metric("batch_tokens_sum") - tokens <= len(kept)  # the first slice is not encoded again
    await stack.check_served()


async def test_chosen_tokens_that_nobody_took_are_cached_in_memory_of_their_own(stack: Stack) -> None:
    """Until all are chosen they have memory for as many as may be."""
    cache, plan = stack.cache, plan_of([video(7)], stack.tower.patches, stack.tower.embed_levels).media[0]
    pending = cache.join(plan, pruning := ItemPruning(RATE, "pixel_change", threshold=0.1))
    assert isinstance(pending, PendingEntry)
    await pending.reserve()
    for message in item_messages(0, video(7), stack.tower.patches, pruned(RATE, 0.1)):
        chunk, number = message.frames.chunk, message.frames.first_frame // 2
        buffer = buffer_for(chunk, [DType.UINT8], chunk.shape)
        add_chunk(buffer, chunk)
        await pending.add_slice(FrameSlice(number, buffer, 0, 0, 0, int32_array(message.frames.kept)))
    while pending.entry is None:
        await pending.wait_for_change()
    cache.leave(pending)
    assert (cache.held_bytes, cache.encoding_bytes.held_bytes) == (item_bytes(stack.tower, SPARSE), 0)
    entry = cache.join(plan, pruning)
    assert isinstance(entry, CacheEntry)
    assert entry.embeds.untyped_storage().nbytes() == item_bytes(stack.tower, SPARSE)


# --- lies -------------------------------------------------------------------------------------------------------

Bend = Callable[[list[PreprocessResponse]], list[PreprocessResponse]]


def with_kept(change: Callable[[tensor_pb2.Tensor], object]) -> Bend:
    """Changes `kept` of the second slice, and nothing else."""

    def bend(messages: list[PreprocessResponse]) -> list[PreprocessResponse]:
        change(messages[1].frames.kept)
        return messages

    return bend


def saying(*kept: int) -> Bend:
    return with_kept(lambda tensor: setattr(tensor, "data", np.array(kept, "<i4").tobytes()))


def absent(messages: list[PreprocessResponse]) -> list[PreprocessResponse]:
    messages[1].frames.ClearField("kept")
    return messages


LIES: dict[str, tuple[prompt_pb2.Pruning, Bend]] = {
    "absent": (pruned(), absent),
    "below the slice": (pruned(), saying(-1, 2, 3)),
    "beyond the slice": (pruned(), saying(2, 3, SLICE)),
    "twice": (pruned(), saying(2, 2, 3)),
    "another dtype": (pruned(), with_kept(lambda tensor: setattr(tensor, "dtype", tensor_pb2.DTYPE_FLOAT32))),
    "another shape": (pruned(), with_kept(lambda tensor: tensor.shape.append(1))),
    "short of bytes": (pruned(), with_kept(lambda tensor: setattr(tensor, "data", tensor.data[:-1]))),
    "of a huge size": (pruned(), with_kept(lambda tensor: tensor.shape.__setitem__(0, 2**62))),
    "more than the pixels": (pruned(), lambda messages: with_pixels(messages, [1, 2])),
    "pixels of the whole slice": (pruned(), lambda messages: [messages[0], *whole_frames(1), *messages[2:]]),
    "too many over the video": (
        pruned(),
        lambda messages: [*messages[:3], *of_slice(3, range(4))],
    ),
    "too many already in the second slice": (pruned(0.75), lambda messages: whole(range(4))),
    "too few at the end": (pruned(), lambda messages: [*messages[:3], *of_slice(3, [1, 2])]),
    "more than the bound": (pruned(RATE, 0.1), lambda messages: whole(range(4))),
    "none at all": (pruned(RATE, 0.1), lambda messages: [each for i in range(4) for each in of_slice(i, [])]),
    "although frames were selected": (pruned(0), lambda messages: [with_all_kept(messages[0]), *messages[1:]]),
}


def whole_frames(number: int) -> list[PreprocessResponse]:
    return slice_messages(0, 2 * number, np.zeros((2, GRID.h * PX, GRID.w * PX, 3), np.uint8))


def with_pixels(messages: list[PreprocessResponse], kept: list[int]) -> list[PreprocessResponse]:
    """The second slice with pixels of so many tokens, but what it said of them before."""
    (bent,) = of_slice(1, kept)
    bent.frames.kept.CopyFrom(messages[1].frames.kept)
    return [messages[0], bent, *messages[2:]]


def with_all_kept(message: PreprocessResponse) -> PreprocessResponse:
    message.frames.kept.CopyFrom(int32_tensor(np.arange(SLICE, dtype=np.int32)))
    return message


@pytest.mark.parametrize("name", LIES)
async def test_chosen_tokens_that_contradict_the_selection_break_the_contract(stack: Stack, name: str) -> None:
    """While another request of the same kind waits for its slices."""
    pruning, bend = LIES[name]
    stack.preprocessing.stall = True
    neighbour = stack.stub.Encode(iter([asking([video(5)], pruned()), SELECT_ALL]))
    await stack.preprocessing.stalled.wait()
    stack.preprocessing.stall, stack.preprocessing.bend_frames = False, bend
    with pytest.raises(errors.PeerContract, match=r"^a peer of Encode broke the contract, request id \w+$"):
        await stack.encode(asking([video(6)], pruning), SELECT_ALL)
    stack.preprocessing.resumed.set()
    assert embeds_in(await read_all(neighbour))[0].kept == expected(stack.tower, 0, video(5), pruned())[0]
    await stack.check_served()
