"""Questions through three real processes: clips and pictures in pieces, and what caches spare the next question."""

from __future__ import annotations

import io
import re
import struct
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import PIL.Image
import pytest
from typer.testing import CliRunner

from gridsieve.__main__ import app
from gridsieve.client.answer import Answer
from gridsieve.client.client import GridsieveClient
from gridsieve.client.encoding import encode
from gridsieve.client.prompt import Frames, Image, Video
from tests import media
from tests.integration.conftest import idle, metric
from tests.integration.fleet import Stack
from tests.preprocessing.preprocessing_media import decoded_in_order

QUESTION = "What moves?"
# By a method after the tower, so that embeddings serve every rate.
PRUNED: Any = {"pruning_rate": 0.5, "pruning_method": "evs"}


async def ask(client: GridsieveClient, clip: int, **options: Any) -> Answer:
    """An answer about the clip of that number."""
    asked = {"max_new_tokens": 8, **PRUNED, "temperature": 0.0, "timeout_s": 30.0} | options
    return await client.ask(Video(data=media.clip(seed=clip)), QUESTION, **asked)  # type: ignore[arg-type]


async def test_clips_that_travel_in_pieces_are_answered_like_small_ones(client: GridsieveClient) -> None:
    """A box that readers skip makes the clips 1.5 and 3 MiB large: pieces of at most 1 MiB follow the prompt."""
    clips = [media.clip(seed=61), media.clip(seed=62)]
    padding = [struct.pack(">I4s", size, b"free") + bytes(size - 8) for size in (3 * 2**19, 3 * 2**20)]
    large = [clip + free for clip, free in zip(clips, padding, strict=True)]
    small_answer, large_answer = [
        await client.ask(
            [Video(data=first), Image(data=media.picture(56, 56)), Video(data=second)],
            QUESTION,
            max_new_tokens=8,
            temperature=0,
            logprobs=True,
        )
        for first, second in (clips, large)
    ]
    assert large_answer.token_ids == small_answer.token_ids
    assert large_answer.logprobs == pytest.approx(small_answer.logprobs, abs=1e-4)


async def test_pictures_are_answered_like_the_clip_whose_frames_they_are(stack: Stack, client: GridsieveClient) -> None:
    """In one message and, 1.6 MiB large, in pieces between the services. The second question encodes nothing."""
    options: Any = {"max_new_tokens": 8, "temperature": 0, "logprobs": True, "pruning_rate": 0.5}
    clip = media.clip(seed=63, width=224, height=224)
    times_s = tuple(number / 4 for number in range(16))
    by_clip = await client.ask(Video(data=clip, fps=4), QUESTION, **options)
    for file_format in ("PNG", "BMP"):
        pictures = _frames_of(clip, file_format)
        assert (sum(map(len, pictures)) > 2**20) == (file_format == "BMP")
        video = Video(frames=Frames(pictures, times_s))
        by_pictures = await client.ask(video, QUESTION, **options)
        assert by_pictures.token_ids == by_clip.token_ids
        assert by_pictures.logprobs == pytest.approx(by_clip.logprobs, abs=1e-4)
        assert by_pictures.usage.media == tuple(replace(each, sampling_mode="") for each in by_clip.usage.media)
        before = await work_done(stack)
        assert (await client.ask(video, QUESTION, **options)).token_ids == by_clip.token_ids
        assert await work_done(stack) == before


def _frames_of(clip: bytes, file_format: str) -> tuple[bytes, ...]:
    """The frames of a clip as pictures without loss."""
    files = []
    for pixels in decoded_in_order(clip):
        files.append(io.BytesIO())
        PIL.Image.fromarray(pixels).save(files[-1], file_format)
    return tuple(file.getvalue() for file in files)


# --- caches -------------------------------------------------------------------------------------------------------


async def work_done(stack: Stack) -> dict[str, float]:
    """Decoded frames, items that the encoder was asked for, and look-ups in its cache."""
    await idle(stack)
    return {
        "frames": metric(stack, "preprocessing", "gridsieve_preprocessing_frames_total"),
        "items": metric(stack, "encoder", "gridsieve_encoder_items_total"),
        "lookups": metric(stack, "encoder", "gridsieve_encoder_cache_lookups_total"),
    }


async def test_a_second_question_about_a_clip_decodes_and_encodes_nothing(
    stack: Stack, client: GridsieveClient
) -> None:
    """At another rate it takes embeddings from the encoder's cache, at the same rate nothing is sent."""
    first = await ask(client, 41)
    before = await work_done(stack)
    again = await ask(client, 41)
    other = await client.ask(Video(data=media.clip(seed=41)), "Of what colour is it?", **PRUNED, max_new_tokens=1)
    assert await work_done(stack) == before
    assert first.usage.cached_prompt_tokens == 0
    assert again.token_ids == first.token_ids
    for answer in (again, other):
        assert answer.usage.cached_prompt_tokens > 0
        assert answer.usage.media == first.usage.media
    await ask(client, 41, pruning_rate=0.25)
    after = await work_done(stack)
    assert after["frames"] == before["frames"]
    assert after["items"] == before["items"] + 1


async def test_slices_that_repeat_one_of_their_video_or_of_one_before_it_are_not_encoded_again(stack: Stack) -> None:
    """A still between others, and then the same from its second slice on, with one that is new."""

    def counts() -> list[int]:
        reused = partial(metric, stack, "encoder", "gridsieve_encoder_reused_slices_total")
        ran = metric(stack, "encoder", "gridsieve_encoder_batch_slices_sum")
        return [int(each) for each in (ran, reused(source="repeated"), reused(source="cached"))]

    found = []
    for shown, expected in (((0, 1, 2, 2, 2, 2, 0, 1), [2, 2, 0]), ((2, 2, 2, 2, 0, 1, 3, 4), [1, 1, 2])):
        pictures = tuple(media.picture(112, 112, seed=640 + each) for each in shown)
        await idle(stack)
        before = counts()
        (made,) = await encode(
            stack.addresses["encoder"], Video(frames=Frames(pictures, tuple(number / 2 for number in range(8))))
        )
        await idle(stack)
        assert [now - then for now, then in zip(counts(), before, strict=True)] == expected
        found.append(np.split(made.values, 4, axis=1))
    first, second = found
    for one, other in ((first[0], first[3]), (first[1], first[2]), (first[1], second[1]), (first[3], second[2])):
        assert np.array_equal(one, other)
    assert not np.allclose(first[0], first[1], atol=1e-3)


@pytest.mark.parametrize("name", ["preprocessing", "encoder"])
def test_the_address_of_another_service_is_reported_with_the_service_that_listens_there(
    stack: Stack, name: str
) -> None:
    result = CliRunner().invoke(app, ["ask", QUESTION, "--server", stack.addresses[name]])
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(rf"UNAVAILABLE: .*\bthis is the {name}\b.* generation .*50053\n", result.stderr)
