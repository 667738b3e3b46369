"""The contract on the wire: plans, prunings and ages survive it, and malformed ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from time import monotonic_ns
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridsieve.common.contract import wire
from gridsieve.common.contract.errors import InvalidRequest, PeerContract
from gridsieve.common.contract.plan import (
    MAX_POSITION,
    MAX_PROMPT_TOKENS,
    FrameShape,
    Grid,
    MediaPlan,
    Modality,
    PromptPlan,
    Run,
)
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.common.contract.tensors import PIECE_BYTES, DType
from gridsieve.v1 import prompt_pb2, tensor_pb2

Message: TypeAlias = prompt_pb2.PromptPlan


def video(offset: int, grid: Grid) -> MediaPlan:
    return MediaPlan(
        modality=Modality.VIDEO,
        grid=grid,
        runs=(Run(offset, grid.tokens),),
        frames=FrameShape(2 * grid.t, (28 * grid.h, 28 * grid.w)),
        seconds_per_grid=Fraction(1001, 1000),
        timestamps_s=tuple(0.5 * i for i in range(2 * grid.t)),
        content_hash=bytes(range(32)),
    )


def sliced_image(offset: int) -> MediaPlan:
    """A source picture and two rows of three slices, a token each."""
    return MediaPlan(
        modality=Modality.IMAGE,
        grid=Grid(1, 7, 1),
        runs=(Run(offset, 7),),
        frames=FrameShape(7, (28, 42), (14, 56), tile_columns=3, dtype=DType.FLOAT32),
        seconds_per_grid=None,
        timestamps_s=(),
        content_hash=bytes(range(32)),
        fixed_tokens=True,
        timed_by_first=True,
    )


def clip(offset: int) -> tuple[MediaPlan, MediaPlan]:
    """A video and its sound, whose tokens take turns: 4 and 3, 4 and 2."""
    sound = MediaPlan(
        modality=Modality.AUDIO,
        grid=Grid(1, 1, 5),
        runs=(Run(offset + 4, 3), Run(offset + 11, 2)),
        frames=FrameShape(1, (16, 21), dtype=DType.FLOAT32),
        seconds_per_grid=None,
        timestamps_s=(),
        content_hash=bytes(range(32)),
        fixed_tokens=True,
        heard_s=0.21,
    )
    return replace(video(offset, Grid(2, 2, 2)), runs=(Run(offset, 4), Run(offset + 7, 4))), sound


def plan_of(tokens: int, *media: MediaPlan) -> PromptPlan:
    rng = np.random.default_rng(tokens)
    ids = rng.integers(0, 2**31 - 1, tokens, dtype=np.int32)
    return PromptPlan(ids, rng.integers(0, MAX_POSITION, (3, tokens), dtype=np.int32), media, 3, b"f" * 32)


def receive(*messages: Message) -> PromptPlan:
    receiver = wire.PlanReceiver()
    *none, plan = [receiver.take_message(message) for message in messages]
    assert not any(none)
    assert plan is not None
    return plan


@given(before=st.integers(0, 5), t=st.integers(1, 4), h=st.integers(1, 4), w=st.integers(1, 4), after=st.integers(0, 5))
def test_a_plan_survives_the_wire(before: int, t: int, h: int, w: int, after: int) -> None:
    item, image = video(before, Grid(t, h, w)), sliced_image(before + t * h * w)
    sent = plan_of(before + item.grid.tokens + 7 + after, item, image)
    received = receive(*wire.plan_messages(sent))
    assert np.array_equal(received.input_ids, sent.input_ids)
    assert np.array_equal(received.positions, sent.positions)
    assert (received.media, received.embed_levels, received.fingerprint) == (sent.media, 3, b"f" * 32)


def test_a_clip_and_its_sound_survive_the_wire() -> None:
    media = (*clip(2), sliced_image(16))
    assert receive(*wire.plan_messages(plan_of(24, *media))).media == media


def no_sound(message: Message) -> None:
    message.media[1].modality, message.media[1].heard_s = prompt_pb2.MODALITY_IMAGE, 0


# Of a plan whose items are those of `clip` and one more video.
FAULTS_OF_CLIPS: dict[str, Callable[[Message], Any]] = {
    "an image between the parts of a video": no_sound,
    "a sound that overlaps its video": lambda m: setattr(m.media[1].runs[1], "offset", 12),
    "a sound that begins before its video": lambda m: setattr(m.media[1].runs[0], "offset", 0),
    "a sound between the parts of two videos": lambda m: m.media.insert(1, m.media[2]),
    "a sound of no seconds": lambda m: setattr(m.media[1], "heard_s", 0),
    "a sound of endless seconds": lambda m: setattr(m.media[1], "heard_s", float("inf")),
    "a video that is heard": lambda m: setattr(m.media[0], "heard_s", 1),
    "a sound of rounded values": lambda m: setattr(m.media[1], "frame_dtype", tensor_pb2.DTYPE_UINT8),
    "a sound of two frames": lambda m: setattr(m.media[1], "frames", 2),
    "a sound of several rows": lambda m: (setattr(m.media[1].grid, "h", 5), setattr(m.media[1].grid, "w", 1)),
}


@pytest.mark.parametrize("fault", FAULTS_OF_CLIPS)
def test_an_inconsistent_clip_breaks_the_contract(fault: str) -> None:
    (message,) = wire.plan_messages(plan_of(26, *clip(3), video(17, Grid(1, 1, 2))))
    FAULTS_OF_CLIPS[fault](message)
    with pytest.raises(PeerContract):
        receive(message)


def test_a_plan_of_128_k_tokens_is_sent_in_several_messages() -> None:
    sent = plan_of(128 * 1024)
    first, second = wire.plan_messages(sent)
    assert [len(message.layout.data) for message in (first, second)] == [PIECE_BYTES, PIECE_BYTES]
    assert np.array_equal(receive(first, second).positions, sent.positions)
    second.media.add()
    with pytest.raises(PeerContract, match="only the first message of a plan"):
        receive(first, second)


def with_last_position(message: Message, value: int) -> None:
    message.layout.data = message.layout.data[:-4] + np.int32(value).tobytes()


def with_runs(message: Message, *runs: Run) -> None:
    del message.media[0].runs[:]
    message.media[0].runs.extend(prompt_pb2.Run(offset=run.offset, length=run.length) for run in runs)


def with_time(message: Message, index: int, time_s: float) -> None:
    message.media[0].timestamps_s[index] = time_s


def as_image(message: Message) -> None:
    message.media[0].modality = prompt_pb2.MODALITY_IMAGE
    message.media[0].ClearField("seconds_per_grid")


def without_tokens(message: Message) -> None:
    message.layout.shape[1] = 0
    message.layout.data = b""


def with_one_frame(message: Message) -> None:
    message.media[0].frames = 1
    del message.media[0].timestamps_s[:]


def with_huge_grid(message: Message) -> None:
    grid = message.media[0].grid
    grid.t = grid.h = grid.w = 2**31 - 1


# A video of grid (2, 2, 2) at tokens 2 to 9 of 10. One row for each check.
FAULTS: dict[str, Callable[[Message], Any]] = {
    "run longer than the grid": lambda m: setattr(m.media[0].runs[0], "length", 9),
    "run beyond the prompt": lambda m: setattr(m.media[0].runs[0], "offset", 3),
    "run below 0": lambda m: setattr(m.media[0].runs[0], "offset", -1),
    "run at 2^63": lambda m: setattr(m.media[0].runs[0], "offset", 2**63 - 1),
    "overlapping runs": lambda m: with_runs(m, Run(2, 4), Run(5, 4)),
    "empty run": lambda m: m.media[0].runs.add(offset=10, length=0),
    "item twice": lambda m: m.media.append(m.media[0]),
    "empty axis": lambda m: setattr(m.media[0].grid, "h", 0),
    "grid whose product overflows": with_huge_grid,
    "no time base": lambda m: m.media[0].ClearField("seconds_per_grid"),
    "denominator 0": lambda m: setattr(m.media[0].seconds_per_grid, "denominator", 0),
    "numerator 0": lambda m: setattr(m.media[0].seconds_per_grid, "numerator", 0),
    "unknown modality": lambda m: setattr(m.media[0], "modality", 2**31 - 1),
    "image with two slices": as_image,
    "missing time": lambda m: m.media[0].timestamps_s.pop(),
    "falling times": lambda m: with_time(m, 1, -1),
    "time NaN": lambda m: with_time(m, 1, float("nan")),
    "too few frames": with_one_frame,
    "2^31 frames": lambda m: setattr(m.media[0], "frames", 2**31 - 1),
    "frames without size": lambda m: setattr(m.media[0], "frame_width_px", 0),
    "fewer pixels than tokens": lambda m: m.media[0].MergeFrom(type(m.media[0])(frame_width_px=1, frame_height_px=1)),
    "frames of 2^31 pixels": lambda m: setattr(m.media[0], "frame_height_px", 2**31 - 1),
    "frames of half precision": lambda m: setattr(m.media[0], "frame_dtype", tensor_pb2.DTYPE_FLOAT16),
    "more columns of a video than tiles": lambda m: setattr(m.media[0], "tile_columns", 2),
    "short content hash": lambda m: setattr(m.media[0], "content_hash", bytes(31)),
    "short fingerprint": lambda m: setattr(m, "fingerprint", b"short"),
    "too many levels": lambda m: setattr(m, "embed_levels", 17),
    "negative levels": lambda m: setattr(m, "embed_levels", -1),
    "layout of three rows": lambda m: m.layout.shape.__setitem__(0, 3),
    "layout of floats": lambda m: setattr(m.layout, "dtype", tensor_pb2.DTYPE_FLOAT32),
    "layout of an unknown type": lambda m: setattr(m.layout, "dtype", 77),
    "no tokens": without_tokens,
    "too many tokens": lambda m: m.layout.shape.__setitem__(1, MAX_PROMPT_TOKENS + 1),
    "negative id": lambda m: setattr(m.layout, "data", np.int32(-1).tobytes() + m.layout.data[4:]),
    "negative position": lambda m: with_last_position(m, -1),
    "position without room for a completion": lambda m: with_last_position(m, 2**31 - 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_inconsistent_plan_breaks_the_contract(fault: str) -> None:
    (message,) = wire.plan_messages(plan_of(10, video(2, Grid(2, 2, 2))))
    FAULTS[fault](message)
    with pytest.raises(PeerContract):
        receive(message)


@pytest.mark.parametrize(
    "extend",
    [lambda m: m.media.extend(m.media[:1] * 512), lambda m: m.media[0].runs.extend(m.media[0].runs[:1] * 2**18)],
    ids=["media", "runs"],
)
def test_media_and_runs_of_a_plan_are_counted_before_they_are_read(extend: Callable[[Message], None]) -> None:
    (message,) = wire.plan_messages(plan_of(10, video(2, Grid(2, 2, 2))))
    extend(message)
    with pytest.raises(PeerContract, match=r"^a plan has at most 512 media and 262144 runs, got \d+ and \d+$"):
        receive(message)


@pytest.mark.parametrize("dtype", [tensor_pb2.DTYPE_INT32, tensor_pb2.DTYPE_UINT8])
def test_axes_are_counted_before_they_are_printed(dtype: tensor_pb2.DType) -> None:
    with pytest.raises(PeerContract, match=r"^an array of 1000000 axes is not allowed, at most 8 are$"):
        wire.int32_array(tensor_pb2.Tensor(dtype=dtype, shape=[1] * 10**6))


# --- prunings ---------------------------------------------------------------------------------------------------


def test_the_pruning_of_an_item_overrides_that_of_the_request() -> None:
    own = prompt_pb2.Part(video=prompt_pb2.Media(pruning=prompt_pb2.Pruning(rate=0.5, method="random", seed=0)))
    plain = [prompt_pb2.Part(text="and"), prompt_pb2.Part(image=prompt_pb2.Media())]
    prompt = prompt_pb2.Prompt(messages=[prompt_pb2.Message(parts=plain), prompt_pb2.Message(parts=[own])])
    assert wire.prunings_of(prompt, prompt_pb2.Pruning(rate=0.75)) == (ItemPruning(0.75), ItemPruning(0.5, "random", 0))
    assert wire.prunings_of(prompt, prompt_pb2.Pruning())[0] == ItemPruning(rate=0.0)
    prompt.messages[1].parts[0].video.pruning.ClearField("rate")
    shared = prompt_pb2.Pruning(rate=0.75, method="vcast", seed=5)
    assert wire.prunings_of(prompt, shared) == (ItemPruning(0.75, "vcast", 5), ItemPruning(0.75, "random", 0))
    prompt.messages[1].parts[0].video.pruning.rate = 1.5
    with pytest.raises(InvalidRequest, match=r"^prompt\.messages\[1\]\.parts\[0\]\.video\.pruning\.rate .* got 1\.5"):
        wire.prunings_of(prompt, prompt_pb2.Pruning())


def test_a_threshold_is_taken_over_by_what_names_neither_rate_nor_method() -> None:
    message, automatic = prompt_pb2.Pruning, prompt_pb2.Pruning(rate=0.75, threshold=0.25)
    cases = [
        (message(), automatic, ItemPruning(0.75, "pixel_change", threshold=0.25)),
        (message(rate=0.5), automatic, ItemPruning(0.5, "random")),
        (message(rate=0.0), automatic, ItemPruning(0.0, "random")),
        (message(rate=0.5), message(method="vcast"), ItemPruning(0.5, "vcast")),
        (message(method="evs"), automatic, ItemPruning(0.75, "evs")),
        (message(threshold=0.5), automatic, ItemPruning(0.75, "pixel_change", threshold=0.5)),
        (message(threshold=0.5), message(rate=0.75, method="vcast"), ItemPruning(0.75, "pixel_change", threshold=0.5)),
    ]
    for own, default, expected in cases:
        assert wire.pruning_of(wire.completed(own, default), usual="random") == expected


# --- ages -------------------------------------------------------------------------------------------------------


@given(ago_ns=st.integers(0, 10**15), way_ns=st.integers(0, 10**9), apart_ns=st.integers(-(10**18), 10**18))
def test_the_time_of_an_event_survives_the_way_to_another_clock(ago_ns: int, way_ns: int, apart_ns: int) -> None:
    event_ns = monotonic_ns() - ago_ns
    sent_s = wire.ago_s(event_ns)
    sent_by_ns = monotonic_ns()
    error_ns = wire.from_ago_s(sent_s, sent_by_ns + way_ns + apart_ns) - (event_ns + apart_ns)
    # The time on the way, and what passed between the two readings of the clock; floats are exact to a microsecond.
    assert way_ns - 1000 <= error_ns <= way_ns + (sent_by_ns - event_ns - ago_ns) + 1000


def test_an_age_is_never_negative_or_infinite() -> None:
    assert wire.ago_s(monotonic_ns() + 10**12) == 0
    for age_s in (-1e-9, float("nan"), float("inf"), float("-inf")):
        with pytest.raises(PeerContract):
            wire.from_ago_s(age_s, 0)
