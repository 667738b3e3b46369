"""The short conversations whose plans a live session's segments are cut from (`request/live_cuts.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from framesieve.common.contract.plan import Grid
from framesieve.services.generation.rpc.live.frames import SLICE_FRAMES, Frame, Slice
from framesieve.v1 import prompt_pb2

# Words of turns of which only their end is taken.
_A_TURN, _ITS_ANSWER = "Hello.", "Hello."
# Between two frames of a slice that is shown again, after the slice.
_LATER_S = 0.001
# A picture file.
_A_PIXEL = b"P6 1 1 255\n" + bytes(3)
_A_SLICE = prompt_pb2.Media(
    embeds=prompt_pb2.MediaEmbeds(
        grid=prompt_pb2.Grid(t=1, h=1, w=1), seconds_per_grid=prompt_pb2.Rational(numerator=1, denominator=1)
    )
)


def turn_slice(before: Sequence[prompt_pb2.Message] | None, piece: Slice, max_pixels: int | None) -> prompt_pb2.Prompt:
    """A turn that begins with a slice. before: the conversation so far; None: one that ends with an answer.

    The slice is shown again, because the size of frames may depend on their number.
    """
    again = [
        replace(frame, time_s=piece.last.time_s + number * _LATER_S)
        for number, frame in enumerate((piece.first, piece.last), 1)
    ]
    return _prompt(_answered() if before is None else before, _video([piece.first, piece.last, *again], max_pixels))


def next_slice(shown: Slice, piece: Slice, max_pixels: int | None, alone: bool = False) -> prompt_pb2.Prompt:
    """A slice after another one of its turn. alone: the other one's pictures are left out."""
    part = _video([shown.first, shown.last, piece.first, piece.last], max_pixels)
    if alone:
        del part.video.frames.pictures[:SLICE_FRAMES]
        part.video.frames.left_out = SLICE_FRAMES
    return _prompt((), part)


def still_slice(shown: Slice, piece: Slice, grid: Grid) -> prompt_pb2.Prompt:
    """As `next_slice`, of models that write a slice's time: what the slices show does not count. grid: of both."""
    times_s = [(each.first.time_s + each.last.time_s) / 2 for each in (shown, piece)]
    embeds = prompt_pb2.MediaEmbeds(grid=prompt_pb2.Grid(t=2, h=grid.h, w=grid.w), timestamps_s=times_s)
    return _prompt((), prompt_pb2.Part(video=prompt_pb2.Media(embeds=embeds)))


def question(
    before: Sequence[prompt_pb2.Message] | None, seen: Sequence[Slice], parts: Sequence[prompt_pb2.Part]
) -> prompt_pb2.Prompt:
    """A question, after one slice of its turn or two; or without any, after the conversation `before`; None: one that
    ends with an answer.

    Of one slice nothing but its end counts, and of two their times, too, so another video is in their place.
    """
    if len(seen) > 1:
        frames = [replace(frame, picture=_A_PIXEL) for each in seen for frame in (each.first, each.last)]
        return _prompt((), _video(frames, None), *parts)
    if seen:
        return _prompt((), prompt_pb2.Part(video=_A_SLICE), *parts)
    return _prompt(_answered() if before is None else before, *parts)


def told(
    before: Sequence[prompt_pb2.Message] | None,
    seen: Sequence[Slice],
    parts: Sequence[prompt_pb2.Part],
    answer: str,
) -> prompt_pb2.Prompt:
    """As `question`, with its answer and one more turn."""
    prompt = question(before, seen, parts)
    for role, text in ((prompt_pb2.ROLE_ASSISTANT, answer), (prompt_pb2.ROLE_USER, _A_TURN)):
        prompt.messages.add(role=role, parts=[prompt_pb2.Part(text=text)])
    return prompt


def _prompt(before: Sequence[prompt_pb2.Message], *parts: prompt_pb2.Part) -> prompt_pb2.Prompt:
    return prompt_pb2.Prompt(messages=[*before, prompt_pb2.Message(role=prompt_pb2.ROLE_USER, parts=parts)])


def _answered() -> list[prompt_pb2.Message]:
    turns = ((prompt_pb2.ROLE_USER, _A_TURN), (prompt_pb2.ROLE_ASSISTANT, _ITS_ANSWER))
    return [prompt_pb2.Message(role=role, parts=[prompt_pb2.Part(text=text)]) for role, text in turns]


def _video(frames: Sequence[Frame], max_pixels: int | None) -> prompt_pb2.Part:
    pictures = prompt_pb2.PictureFrames(
        pictures=[frame.picture for frame in frames],
        timestamps_s=[frame.time_s for frame in frames],
        by_time=True,
    )
    sampling = prompt_pb2.FrameSampling(max_pixels=max_pixels)
    return prompt_pb2.Part(video=prompt_pb2.Media(frames=pictures, frame_sampling=sampling))
