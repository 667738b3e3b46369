"""Plans and prunings through protobuf: what goes in comes out, and what contradicts itself is a peer's fault."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import wire
from common.errors import InvalidRequest, PeerContract
from common.plan import MAX_POSITION, MAX_PROMPT_TOKENS, Grid, MediaPlan, Modality, PromptPlan, Run
from common.retention import Pruning
from common.tensors import PIECE_BYTES
from framesieve.v1 import prompt_pb2, tensor_pb2


def video(offset: int, grid: Grid) -> MediaPlan:
    return MediaPlan(
        modality=Modality.VIDEO,
        grid=grid,
        runs=(Run(offset, grid.tokens),),
        frames=2 * grid.t,
        frame_height_px=28 * grid.h,
        frame_width_px=28 * grid.w,
        seconds_per_grid=Fraction(1001, 1000),
        timestamps_s=tuple(0.5 * i for i in range(2 * grid.t)),
        content_hash=bytes(range(32)),
    )


def plan_of(tokens: int, *media: MediaPlan) -> PromptPlan:
    rng = np.random.default_rng(tokens)
    return PromptPlan(
        input_ids=rng.integers(0, 2**31 - 1, tokens, dtype=np.int32),
        positions=rng.integers(0, MAX_POSITION, (3, tokens), dtype=np.int32),
        media=media,
        embed_levels=0,
        fingerprint=b"f" * 32,
    )


def receive(messages: list[prompt_pb2.PromptPlan]) -> PromptPlan | None:
    receiver = wire.PlanReceiver()
    plans = [receiver.add(message) for message in messages]
    assert plans[:-1] == [None] * (len(plans) - 1)
    return plans[-1]


@given(before=st.integers(0, 5), t=st.integers(1, 4), h=st.integers(1, 4), w=st.integers(1, 4), after=st.integers(0, 5))
def test_a_plan_survives_the_wire(before: int, t: int, h: int, w: int, after: int) -> None:
    item = video(before, Grid(t, h, w))
    sent = plan_of(before + item.grid.tokens + after, item)
    received = receive(list(wire.plan_messages(sent)))
    assert received is not None
    assert np.array_equal(received.input_ids, sent.input_ids)
    assert np.array_equal(received.positions, sent.positions)
    assert (received.media, received.embed_levels, received.fingerprint) == (sent.media, 0, b"f" * 32)


def test_a_plan_of_128_k_tokens_is_sent_in_messages_of_a_piece_each() -> None:
    sent = plan_of(128 * 1024)
    messages = list(wire.plan_messages(sent))
    assert [len(message.layout.data) for message in messages] == [PIECE_BYTES, PIECE_BYTES]
    received = receive(messages)
    assert received is not None
    assert np.array_equal(received.positions, sent.positions)


def longer_run(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].runs[0].length += 1


def run_outside(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].runs[0].offset = 3


def negative_run(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].runs[0].offset = -1


def same_item_twice(message: prompt_pb2.PromptPlan) -> None:
    message.media.append(message.media[0])


def empty_axis(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].grid.h = 0


def huge_axis(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].grid.t = 2**31 - 1


def no_time_base(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].ClearField("seconds_per_grid")


def zero_denominator(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].seconds_per_grid.denominator = 0


def unknown_modality(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].modality = prompt_pb2.MODALITY_UNSPECIFIED


def short_fingerprint(message: prompt_pb2.PromptPlan) -> None:
    message.fingerprint = b"short"


def three_rows(message: prompt_pb2.PromptPlan) -> None:
    message.layout.shape[0] = 3


def too_many_tokens(message: prompt_pb2.PromptPlan) -> None:
    message.layout.shape[1] = MAX_PROMPT_TOKENS + 1


def floats(message: prompt_pb2.PromptPlan) -> None:
    message.layout.dtype = tensor_pb2.DTYPE_FLOAT32


def too_many_levels(message: prompt_pb2.PromptPlan) -> None:
    message.embed_levels = 17


def time_missing(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].timestamps_s.pop()


def time_falls(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].timestamps_s[1] = -1


def time_is_no_number(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].timestamps_s[1] = float("nan")


def too_few_frames(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].frames = 1
    del message.media[0].timestamps_s[:]


def negative_denominators(message: prompt_pb2.PromptPlan) -> None:
    step = message.media[0].seconds_per_grid
    step.numerator, step.denominator = -step.numerator, -step.denominator


def time_is_endless(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].timestamps_s[-1] = float("inf")


def frames_smaller_than_their_grid(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].frame_width_px = 1


def frames_of_2_31_pixels(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].frame_height_px = 2**31 - 1


def endless_frames(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].frames = 2**31 - 1


def overflowing_grid(message: prompt_pb2.PromptPlan) -> None:
    grid = message.media[0].grid
    grid.t = grid.h = grid.w = 2**31 - 1


def huge_run(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].runs[0].offset = 2**63 - 1


def overlapping_runs(message: prompt_pb2.PromptPlan) -> None:
    del message.media[0].runs[:]
    message.media[0].runs.add(offset=2, length=4)
    message.media[0].runs.add(offset=5, length=4)


def unsorted_runs(message: prompt_pb2.PromptPlan) -> None:
    del message.media[0].runs[:]
    message.media[0].runs.add(offset=6, length=4)
    message.media[0].runs.add(offset=2, length=4)


def more_media_than_any_prompt(message: prompt_pb2.PromptPlan) -> None:
    message.media.extend(message.media[:1] * 512)


def more_runs_than_any_prompt(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].runs.extend(message.media[0].runs[:1] * 2**18)


def short_content_hash(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].content_hash = bytes(31)


def moving_image(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].modality = prompt_pb2.MODALITY_IMAGE
    message.media[0].ClearField("seconds_per_grid")


def a_modality_of_tomorrow(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].modality = 2**31 - 1  # type: ignore[assignment]


def negative_levels(message: prompt_pb2.PromptPlan) -> None:
    message.embed_levels = -1


def negative_ids(message: prompt_pb2.PromptPlan) -> None:
    message.layout.data = np.int32(-1).tobytes() + message.layout.data[4:]


def negative_positions(message: prompt_pb2.PromptPlan) -> None:
    message.layout.data = message.layout.data[:-4] + np.int32(-1).tobytes()


def positions_that_no_answer_can_follow(message: prompt_pb2.PromptPlan) -> None:
    message.layout.data = message.layout.data[:-4] + np.int32(2**31 - 1).tobytes()


def no_tokens(message: prompt_pb2.PromptPlan) -> None:
    message.layout.shape[1] = 0
    message.layout.data = b""


def fewer_tokens_than_none(message: prompt_pb2.PromptPlan) -> None:
    message.layout.shape[1] = -1


def hundreds_of_axes(message: prompt_pb2.PromptPlan) -> None:
    message.layout.shape.extend([1] * 200)


def layout_beyond_its_end(message: prompt_pb2.PromptPlan) -> None:
    message.layout.data += b"1234"


def layout_from_its_middle_on(message: prompt_pb2.PromptPlan) -> None:
    message.layout.offset_bytes = 80


def frames_without_size(message: prompt_pb2.PromptPlan) -> None:
    message.media[0].frame_width_px = 0


@pytest.mark.parametrize(
    "spoil",
    [
        longer_run,
        run_outside,
        negative_run,
        same_item_twice,
        empty_axis,
        huge_axis,
        no_time_base,
        zero_denominator,
        unknown_modality,
        short_fingerprint,
        three_rows,
        too_many_tokens,
        floats,
        too_many_levels,
        time_missing,
        time_falls,
        time_is_no_number,
        too_few_frames,
        frames_without_size,
        negative_denominators,
        time_is_endless,
        frames_smaller_than_their_grid,
        frames_of_2_31_pixels,
        endless_frames,
        overflowing_grid,
        huge_run,
        overlapping_runs,
        unsorted_runs,
        short_content_hash,
        moving_image,
        a_modality_of_tomorrow,
        negative_levels,
        negative_ids,
        negative_positions,
        positions_that_no_answer_can_follow,
        no_tokens,
        fewer_tokens_than_none,
        hundreds_of_axes,
        layout_beyond_its_end,
        layout_from_its_middle_on,
    ],
)
def test_a_plan_that_contradicts_itself_is_a_broken_contract(spoil: Callable[[prompt_pb2.PromptPlan], None]) -> None:
    (message,) = wire.plan_messages(plan_of(10, video(2, Grid(2, 2, 2))))
    spoil(message)
    with pytest.raises(PeerContract):
        receive([message])


@pytest.mark.parametrize("spoil", [more_media_than_any_prompt, more_runs_than_any_prompt])
def test_what_a_plan_counts_is_counted_before_it_is_read(spoil: Callable[[prompt_pb2.PromptPlan], None]) -> None:
    (message,) = wire.plan_messages(plan_of(10, video(2, Grid(2, 2, 2))))
    spoil(message)
    with pytest.raises(PeerContract, match=r"^a plan has at most 512 media and 262144 runs, got \d+ and \d+$"):
        receive([message])


def test_a_later_piece_of_a_plan_brings_layout_alone() -> None:
    first, second = wire.plan_messages(plan_of(128 * 1024))
    second.media.add()
    with pytest.raises(PeerContract, match="more than layout"):
        receive([first, second])


@pytest.mark.parametrize("dtype", [tensor_pb2.DTYPE_INT32, tensor_pb2.DTYPE_UINT8])
def test_axes_are_counted_before_they_are_told_whatever_the_type(dtype: tensor_pb2.DType) -> None:
    with pytest.raises(PeerContract, match=r"^an array of 1000000 axes is not allowed, at most 8 are$"):
        wire.int32_array(tensor_pb2.Tensor(dtype=dtype, shape=[1] * 10**6))


def test_an_items_own_pruning_overrides_the_requests() -> None:
    prompt = prompt_pb2.Prompt(
        messages=[
            prompt_pb2.Message(
                parts=[
                    prompt_pb2.Part(
                        video=prompt_pb2.Media(pruning=prompt_pb2.Pruning(rate=0.5, method="random", seed=0))
                    ),
                    prompt_pb2.Part(text="and"),
                    prompt_pb2.Part(image=prompt_pb2.Media()),
                ]
            ),
            prompt_pb2.Message(parts=[prompt_pb2.Part(video=prompt_pb2.Media())]),
        ]
    )
    shared = Pruning(rate=0.75)
    assert wire.prunings_of(prompt, prompt_pb2.Pruning(rate=0.75)) == (Pruning(0.5, "random", 0), shared, shared)
    assert wire.prunings_of(prompt, prompt_pb2.Pruning())[1] == Pruning(rate=0.0)


@pytest.mark.parametrize(
    ("pruning", "says"),
    [
        (prompt_pb2.Pruning(rate=1.0), "below 1, got 1.0"),
        (prompt_pb2.Pruning(rate=-0.1), "got -0.1"),
        (prompt_pb2.Pruning(rate=float("nan")), "got nan"),
        (prompt_pb2.Pruning(method="best"), "'best' does not exist, the methods are evs, vidcom2, random, none"),
        (prompt_pb2.Pruning(method="random", seed=-1), "got -1"),
    ],
)
def test_a_pruning_outside_its_range_names_field_value_and_limit(pruning: prompt_pb2.Pruning, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        wire.pruning_of(pruning)


def test_an_items_own_pruning_outside_its_range_is_named_with_its_place() -> None:
    own = prompt_pb2.Part(video=prompt_pb2.Media(pruning=prompt_pb2.Pruning(rate=1.5)))
    prompt = prompt_pb2.Prompt(messages=[prompt_pb2.Message(parts=[prompt_pb2.Part(text="this"), own])])
    with pytest.raises(InvalidRequest, match=r"^prompt\.messages\[0\]\.parts\[1\]\.video\.pruning\.rate .* got 1\.5"):
        wire.prunings_of(prompt, prompt_pb2.Pruning())
