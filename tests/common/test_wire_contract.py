"""Plans and arrays that contradict themselves, field by field: a peer's fault, and counted before they are read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from common.contract import wire
from common.contract.errors import PeerContract
from common.contract.plan import MAX_PROMPT_TOKENS, Grid
from framesieve.v1 import prompt_pb2, tensor_pb2
from tests.common.wire_plans import plan_of, receive, video


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
