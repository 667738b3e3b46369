"""The short conversations whose plans a live session's segments are cut from (`request/live_cuts.py`).

Pictures of more than a piece are not put into the prompt, where each message around them would copy them: it announces
their sizes, and they follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.tensors import PIECE_BYTES
from gridsieve.services.generation.live.frames import SLICE_FRAMES, US_PER_S, Frame, FramePair
from gridsieve.services.generation.live.window import Answered
from gridsieve.v1 import prompt_pb2

# Words of turns of which only their end is taken.
_A_TURN, _ITS_ANSWER = "Hello.", "Hello."
# Between two frames of a slice that is shown again, after the slice.
_LATER_US = 1000
# A picture file.
_A_PIXEL = b"P6 1 1 255\n" + bytes(3)
_A_SLICE = prompt_pb2.Media(
    embeds=prompt_pb2.MediaEmbeds(
        grid=prompt_pb2.Grid(t=1, h=1, w=1), seconds_per_grid=prompt_pb2.Rational(numerator=1, denominator=1)
    )
)

# The conversation so far, before the present turn; None: one that ends with an answer.
Before: TypeAlias = Sequence[prompt_pb2.Message] | None
# A prompt, and the pictures that it announces, in order.
Announcing: TypeAlias = tuple[prompt_pb2.Prompt, Sequence[bytes | bytearray]]


def turn_slice(before: Before, pair: FramePair, max_pixels: int | None) -> Announcing:
    """A turn that begins with a slice.

    The slice is shown again, because the size of frames may depend on their number.
    """
    again = [
        replace(frame, time_us=pair.last.time_us + number * _LATER_US)
        for number, frame in enumerate((pair.first, pair.last), 1)
    ]
    video, pictures = _video([pair.first, pair.last, *again], max_pixels)
    return _prompt(_answered() if before is None else before, video), pictures


def next_slice(shown: FramePair, pair: FramePair, max_pixels: int | None, alone: bool = False) -> Announcing:
    """A slice after another one of its turn. alone: the other one's pictures are left out."""
    left_out = SLICE_FRAMES if alone else 0
    video, pictures = _video([shown.first, shown.last, pair.first, pair.last], max_pixels, left_out)
    return _prompt((), video), pictures


def still_slice(shown: FramePair, pair: FramePair, grid: Grid) -> prompt_pb2.Prompt:
    """As `next_slice`, of models that write a slice's time: what the slices show does not count. grid: of both."""
    times_s = [(each.first.time_us / US_PER_S + each.last.time_us / US_PER_S) / 2 for each in (shown, pair)]
    embeds = prompt_pb2.MediaEmbeds(grid=prompt_pb2.Grid(t=2, h=grid.h, w=grid.w), timestamps_s=times_s)
    return _prompt((), prompt_pb2.Part(video=prompt_pb2.Media(embeds=embeds)))


def question(before: Before, seen: Sequence[FramePair], texts: Sequence[str]) -> prompt_pb2.Prompt:
    """A question, after one slice of its turn or two; or without any, after the conversation `before`.

    Of one slice nothing but its end counts, and of two their times, too, so another video is in their place.
    """
    parts = [prompt_pb2.Part(text=text) for text in texts]
    if len(seen) > 1:
        frames = [replace(frame, picture=_A_PIXEL) for each in seen for frame in (each.first, each.last)]
        return _prompt((), _video(frames, None)[0], *parts)
    if seen:
        return _prompt((), prompt_pb2.Part(video=_A_SLICE), *parts)
    return _prompt(_answered() if before is None else before, *parts)


def told(before: Before, seen: Sequence[FramePair], answered: Answered) -> prompt_pb2.Prompt:
    """As `question`, with its answer and one more turn."""
    prompt = question(before, seen, answered.texts)
    said = [prompt_pb2.Part(text=answered.answer or " ")]
    prompt.messages.add(role=prompt_pb2.ROLE_ASSISTANT, parts=said, thought=answered.thought)
    prompt.messages.add(role=prompt_pb2.ROLE_USER, parts=[prompt_pb2.Part(text=_A_TURN)])
    return prompt


def _prompt(before: Sequence[prompt_pb2.Message], *parts: prompt_pb2.Part) -> prompt_pb2.Prompt:
    return prompt_pb2.Prompt(messages=[*before, prompt_pb2.Message(role=prompt_pb2.ROLE_USER, parts=parts)])


def _answered() -> list[prompt_pb2.Message]:
    turns = ((prompt_pb2.ROLE_USER, _A_TURN), (prompt_pb2.ROLE_ASSISTANT, _ITS_ANSWER))
    return [prompt_pb2.Message(role=role, parts=[prompt_pb2.Part(text=text)]) for role, text in turns]


def _video(
    frames: Sequence[Frame], max_pixels: int | None, left_out: int = 0
) -> tuple[prompt_pb2.Part, Sequence[bytes | bytearray]]:
    """A video of these frames, and the pictures that it announces. left_out: the first ones are not sent."""
    times_s = [frame.time_us / US_PER_S for frame in frames]
    shown = prompt_pb2.PictureFrames(timestamps_s=times_s, by_time=True, left_out=left_out)
    pictures = [frame.picture for frame in frames[left_out:]]
    if announces := sum(map(len, pictures)) > PIECE_BYTES:
        shown.sizes_bytes.extend(map(len, pictures))
    else:
        shown.pictures.extend(map(bytes, pictures))
    sampling = prompt_pb2.FrameSampling(max_pixels=max_pixels)
    part = prompt_pb2.Part(video=prompt_pb2.Media(frames=shown, frame_sampling=sampling))
    return part, pictures if announces else ()
