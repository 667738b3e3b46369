"""Which places of a camera's picture are shown to the model: by what it was last shown of each, or by other rules.

Rules, over footage in which things change slowly; every rule shows the first slice whole:

    reference       a place, by its lasting change since it was last shown: what live sessions do
    slice before    a place, by its change since the slice before: what they did
    embedding       a whole frame, by the cosine of its embedding and that of the frame last kept, as NVIDIA's VSS does
                    it; one threshold for all footage, at which it keeps as many tokens as `reference`

What a rule leaves the model with is judged by the pixels: how far a place is from what was last shown of it. Another
measurement asks the embedded model about scenes of its own kind that come out of the dark.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.live.footage import FOOTAGE, USED_FPS, Pixels, frames
from benchmarks.table import Row
from demo.clips import EVALUATION_SEEDS
from demo.drawing import encode as encoded
from demo.questions import questions_about
from demo.scenes import random_scene
from gridsieve import Frames, GridsieveClient, Pruning, Video, encode
from gridsieve.cli.launcher import LocalStack
from gridsieve.common.checkpoint import DEMO_MODEL
from gridsieve.common.contract.retention import AUTO_THRESHOLD, NONE, PIXEL_CHANGE
from gridsieve.services.preprocessing.pruning.change import BLOCKS_A_SIDE, STEPS, block_means, change
from gridsieve.services.preprocessing.pruning.reference import Reference
from gridsieve.services.preprocessing.video.resize import resize_into

_TOKEN_PX, _ROWS, _COLUMNS = 28, 8, 11
_TOKENS = _ROWS * _COLUMNS
# A place is out of date when it is, on average, so many levels from what was last shown of it.
_OUT_OF_DATE = 8
# An error of none, of a rule that shows every frame, is printed as this: errors are divided by each other.
_LEAST = 0.1
_DARK_S = 14.0
_ASKED: Any = {"temperature": 0, "max_new_tokens": 24}

Means = NDArray[np.int32]
Shown = NDArray[np.bool_]  # [slices, tokens]


@dataclass(frozen=True, slots=True)
class Judged:
    """error: the largest of a place, mean levels. out_of_date_s: of a place, the longest. tokens: of all slices."""

    tokens: int
    error: float
    out_of_date_s: int


def by_reference(means: Sequence[Means]) -> Shown:
    shown, reference = np.zeros((len(means), _TOKENS), np.bool_), Reference.of(means[0])
    shown[0] = True
    for row, each in zip(shown[1:], means[1:], strict=True):
        kept, reference = reference.next(each, AUTO_THRESHOLD)
        row[kept] = True
    return shown


def by_slice_before(means: Sequence[Means]) -> Shown:
    pairs = zip(means[1:], means[:-1], strict=True)
    changed = [change(each, before) >= 255 * AUTO_THRESHOLD for each, before in pairs]
    return np.stack([np.ones(_TOKENS, np.bool_), *changed])


def by_embedding(embeds: NDArray[np.float32], threshold: float) -> Shown:
    """embeds: [slices, D], unit vectors."""
    shown, last = np.zeros((len(embeds), _TOKENS), np.bool_), None
    for row, each in zip(shown, embeds, strict=True):
        if last is None or float(each @ last) < threshold:
            row[:], last = True, each
    return shown


def judged(means: Sequence[Means], shown: Shown) -> Judged:
    known, error, longest, lasts = means[0], _LEAST, 0, np.zeros(_TOKENS, np.int64)
    for each, row in zip(means, shown, strict=True):
        places = row.reshape(_ROWS, _COLUMNS).repeat(BLOCKS_A_SIDE, 0).repeat(BLOCKS_A_SIDE, 1)
        known = np.where(places, each, known)
        blocks = np.abs(each - known).sum(0).reshape(_ROWS, BLOCKS_A_SIDE, _COLUMNS, BLOCKS_A_SIDE)
        errors = blocks.mean((1, 3)).ravel() / STEPS
        lasts = np.where(errors > _OUT_OF_DATE, lasts + 1, 0)
        error, longest = max(error, float(errors.max())), max(longest, int(lasts.max()))
    return Judged(int(shown.sum()), error, longest * 2 // USED_FPS)


def change_rules(rounds: int) -> list[Row]:
    """The rows of all footage, and of questions. The figures are exact: rounds do not count."""
    films = {name: frames(name) for name in FOOTAGE}
    means = {name: list(_means(film)) for name, film in films.items()}
    embeds = asyncio.run(_embeds(films))
    ours = {name: by_reference(each) for name, each in means.items()}
    tokens = sum(int(each.sum()) for each in ours.values())
    low, high = -1.0, 1.0  # the highest threshold that keeps at most as many tokens
    for _ in range(40):
        middle = (low + high) / 2
        kept = sum(int(by_embedding(each, middle).sum()) for each in embeds.values())
        low, high = (middle, high) if kept <= tokens else (low, middle)
    rows = []
    for name, each in means.items():
        shown = {
            "reference": ours[name],
            "slice before": by_slice_before(each),
            "embedding": by_embedding(embeds[name], low),
        }
        found = {rule: judged(each, kept) for rule, kept in shown.items()}
        note = f"{len(each)} slices; " + "; ".join(
            f"{rule}: {one.tokens / _TOKENS:.1f} slices of tokens, out of date for {one.out_of_date_s} s at most"
            for rule, one in found.items()
        )
        error = found["reference"].error
        what = f"{name}: the largest error of what was last shown of a place"
        rows.append(Row(what, "slice before", error, found["slice before"].error, "levels", note=note))
        rows.append(Row(what, "embedding, at equal tokens", error, found["embedding"].error, "levels"))
    spent = sum(each.size for each in ours.values())
    rows.append(Row("tokens of all footage that are kept", "all tokens", tokens, spent, "tokens"))
    return rows


def _means(film: Sequence[Pixels]) -> Iterator[Means]:
    pixels = np.empty((2, _ROWS * _TOKEN_PX, _COLUMNS * _TOKEN_PX, 3), np.uint8)
    for first in range(0, len(film) - 1, 2):
        for row, frame in zip(pixels, film[first:], strict=False):
            resize_into(frame, row)
        yield block_means(pixels, _TOKEN_PX)


async def _embeds(films: Mapping[str, Sequence[Pixels]]) -> dict[str, NDArray[np.float32]]:
    """A unit vector for each slice of each film: the mean of its tokens, by the embedded model's tower."""
    embeds = {}
    async with LocalStack(DEMO_MODEL) as stack:
        for name, film in films.items():
            times_s = tuple(number / USED_FPS for number in range(len(film)))
            (made,) = await encode(stack.addresses["encoder"], Video(frames=Frames(tuple(map(_png, film)), times_s)))
            tokens = made.values[0].astype(np.float32)
            means = tokens.reshape(made.plan.grid.t, -1, tokens.shape[-1]).mean(1)
            embeds[name] = means / np.linalg.norm(means, axis=1, keepdims=True)
    return embeds


def out_of_the_dark(rounds: int) -> list[Row]:
    """Right answers of the embedded model about scenes that come out of the dark slowly; a round is a scene."""
    return [asyncio.run(_answers(rounds))]


async def _answers(scenes: int) -> Row:
    right, asked = dict.fromkeys(("live", "file", "whole"), 0), 0
    changed = Pruning(method=PIXEL_CHANGE, threshold=AUTO_THRESHOLD)
    async with LocalStack(DEMO_MODEL) as stack, GridsieveClient(stack.address) as client:
        for seed in range(EVALUATION_SEEDS, EVALUATION_SEEDS + scenes):
            scene = replace(random_scene(seed, "still"), brightness=((0.0, 0.0), (_DARK_S, 1.0)))
            pictures = _pictures(encoded(scene))
            video = Video(frames=Frames(tuple(pictures), tuple(number / USED_FPS for number in range(len(pictures)))))
            async with client.live(pruning=changed) as session:
                for number, picture in enumerate(pictures):
                    await session.show(picture, number / USED_FPS)
                    if number % 2:
                        await session.answer("?", transient=True, max_new_tokens=1)  # waits for the slice
                for question in questions_about(scene, Random(seed)):
                    asked += 1
                    told = {"live": await session.answer(question.text, transient=True, **_ASKED)}
                    for how, pruning in (("file", changed), ("whole", Pruning(method=NONE))):
                        told[how] = await client.ask(replace(video, pruning=pruning), question.text, **_ASKED)
                    for how, answer in told.items():
                        right[how] += answer.text == question.answer
    what = f"right answers about {scenes} scenes that come out of the dark in {_DARK_S:g} s, live"
    note = f"{asked} questions; a file by the same threshold, every eighth slice whole: {right['file']}"
    return Row(what, "a file of which all tokens are kept", right["live"], right["whole"], "answers", note=note)


def _pictures(clip: bytes) -> list[bytes]:
    with av.open(io.BytesIO(clip), "r") as container:
        stream = container.streams.video[0]
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    return [_png(each) for each in decoded[:: len(decoded) // (16 * USED_FPS)]]


def _png(pixels: Pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
