"""A threshold in place of a rate, by every door, and what generation's own pruning makes of what a request leaves out.

A still clip keeps its first slice, a busy one all that it may.
"""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import numpy as np
import PIL.Image
import pytest

from gridsieve import Grid, GridsieveClient, Image, Pruning, Video, encode
from gridsieve.client.encoding import Encoded
from gridsieve.common.contract.retention import AUTO_THRESHOLD, METHODS
from tests import media
from tests.integration.conftest import another_generation
from tests.integration.fleet import Service, Stack, exported, metric_in
from tests.integration.gateway import brought, data_url, gateway, image, question, video

SIDE_PX, FRAMES = 112, 8
RATE = 0.5
ABOVE_ANY_CHANGE = 0.9375
# Of a video: tokens before pruning, how many were kept, and the rate that came of it.
Counts: TypeAlias = tuple[Grid, int, float]


def clip(*seeds: int) -> bytes:
    """An animation of two frames a second, whose pixels are exact: the pictures of these seeds."""
    pictures = [PIL.Image.open(io.BytesIO(media.picture(SIDE_PX, SIDE_PX, seed))) for seed in seeds]
    for index, each in enumerate(pictures):
        each.putpixel((0, 0), (index, 0, 0))  # equal frames would be written as one
    file = io.BytesIO()
    pictures[0].save(file, "PNG", save_all=True, append_images=pictures[1:], duration=500)
    return file.getvalue()


STILL, BUSY = clip(*[0] * FRAMES), clip(*range(FRAMES))
PICTURE = media.picture(64, 48)


@dataclass(frozen=True)
class Automatic:
    """Generation that prunes by a threshold where a request says nothing. url: of a gateway before it."""

    generation: Service
    url: str

    @property
    def address(self) -> str:
        return self.generation.address


@pytest.fixture(scope="module")
def automatic(stack: Stack, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Automatic]:
    folder = tmp_path_factory.mktemp("automatic")
    flags = ("--kv-cache-tokens", "2048", "--pruning-rate", str(RATE), "--pruning-threshold", str(AUTO_THRESHOLD))
    with (
        another_generation(stack, tiny_checkpoint, folder, *flags) as generation,
        gateway(generation.address, folder, "--encoder", stack.addresses["encoder"]) as door,
    ):
        yield Automatic(generation, door.url)


def by_python(asked: Automatic, data: bytes, pruning: Mapping[str, float]) -> Counts:
    return asyncio.run(
        asked_about(asked, Video(data=data), {f"pruning_{name}": each for name, each in pruning.items()})
    )


def by_python_of_a_video(asked: Automatic, data: bytes, pruning: Mapping[str, float]) -> Counts:
    own = Pruning(**pruning)  # type: ignore[arg-type]
    return asyncio.run(asked_about(asked, Video(data=data, pruning=own), {"pruning_method": "vcast"}))


async def asked_about(asked: Automatic, part: Video, options: Any) -> Counts:
    async with GridsieveClient(asked.address) as client:
        usage = (await client.ask(part, "What moves?", **options, max_new_tokens=1)).usage
    (item,) = usage.media
    assert usage.prompt_tokens_full - usage.prompt_tokens == item.grid.tokens - item.num_kept
    return item.grid, item.num_kept, item.pruning_rate


def by_http(path: str) -> Callable[[Automatic, bytes, Mapping[str, float]], Counts]:
    def counts(asked: Automatic, data: bytes, pruning: Mapping[str, float]) -> Counts:
        url = data_url("image/png", data)
        body = question(video(url), "What moves?", max_tokens=1)
        if path == "/v1/responses":
            content = [{"type": "input_file", "file_data": url}, {"type": "input_text", "text": "What moves?"}]
            body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 1}
        (counted,) = told(asked, path, body | {"pruning": pruning})
        return counted

    return counts


def told(asked: Automatic, path: str, body: Mapping[str, Any]) -> list[Counts]:
    """Of each item, as an answer by HTTP tells it."""
    answer = httpx.post(f"{asked.url}{path}", json=body, timeout=60, trust_env=False).raise_for_status().json()
    items = answer["media"] if "media" in answer else answer["usage"]["gridsieve"]["media"]
    grids = [Grid(**item["grid"]) for item in items]
    counts = [len(item["kept"]) if "kept" in item else item["kept_tokens"] for item in items]
    return [
        (grid, kept, item.get("pruning_rate", 1 - kept / grid.tokens))
        for grid, kept, item in zip(grids, counts, items, strict=True)
    ]


DOORS = {
    "Python": by_python,
    "a video of its own": by_python_of_a_video,
    "chat completions": by_http("/v1/chat/completions"),
    "responses": by_http("/v1/responses"),
    "the kept tokens": by_http("/v1/gridsieve/kept"),
}


def at_most(grid: Grid, rate: float) -> int:
    """What the rate leaves, but at least the first slice."""
    return max(grid.slice_tokens, math.floor(grid.tokens * (1 - rate)))


@pytest.mark.parametrize("door", DOORS)
def test_a_threshold_keeps_what_changed_and_usage_says_the_rate_that_came_of_it(
    automatic: Automatic, door: str
) -> None:
    for threshold, changed in ((AUTO_THRESHOLD, True), (ABOVE_ANY_CHANGE, False)):
        grid, num_kept, rate = DOORS[door](automatic, BUSY, {"rate": 0.25, "threshold": threshold})
        assert grid.slice_tokens < at_most(grid, 0.25) < grid.tokens
        assert num_kept == (at_most(grid, 0.25) if changed else grid.slice_tokens)
        assert rate == pytest.approx(1 - num_kept / grid.tokens)


NOTHING = Pruning()
# What a request says, what its video says, and how many tokens of the still clip are kept.
SAID: dict[str, tuple[Pruning, Pruning, Callable[[Grid], int]]] = {
    "nothing": (NOTHING, NOTHING, lambda grid: grid.slice_tokens),
    "a rate": (Pruning(0.25), NOTHING, lambda grid: at_most(grid, 0.25)),
    "a rate of 0": (Pruning(0.0), NOTHING, lambda grid: grid.tokens),
    "a method": (Pruning(method="evs"), NOTHING, lambda grid: at_most(grid, RATE)),
    "to keep all": (Pruning(method="none"), NOTHING, lambda grid: grid.tokens),
    "a rate of 0 of the video": (NOTHING, Pruning(0.0), lambda grid: grid.tokens),
    "a rate, and the video a method": (
        *(Pruning(0.6), Pruning(method="evs_causal")),
        lambda grid: grid.slice_tokens + (grid.t - 1) * (grid.slice_tokens * 2 // 5),
    ),
}


def test_of_a_busy_clip_a_request_that_says_nothing_keeps_what_the_services_rate_leaves(automatic: Automatic) -> None:
    grid, num_kept, _ = by_python(automatic, BUSY, {})
    assert num_kept == at_most(grid, RATE)


@pytest.mark.parametrize("name", SAID)
def test_what_a_request_does_not_say_is_as_the_service_was_told(automatic: Automatic, name: str) -> None:
    of_request, of_video, kept = SAID[name]
    parts = [Video(data=STILL, pruning=of_video), Image(data=PICTURE)]
    options: Any = {"pruning_rate": of_request.rate, "pruning_method": of_request.method, "max_new_tokens": 1}

    async def items() -> Any:
        async with GridsieveClient(automatic.address) as client:
            return (await client.ask(parts, "What moves?", **options)).usage.media

    found = asyncio.run(items())
    grid, whole = [item.grid for item in found]
    wanted = [kept(grid), whole.tokens]
    assert [item.num_kept for item in found] == wanted
    assert len({count(grid) for _, _, count in SAID.values()}) == 5  # the cases can be told apart
    url = data_url("image/png", STILL)
    body = question(video(url, pruning=asdict(of_video)), image(data_url("image/png", PICTURE)), "?", max_tokens=1)
    for path in ("/v1/chat/completions", "/v1/gridsieve/kept"):
        assert [count for _, count, _ in told(automatic, path, body | {"pruning": asdict(of_request)})] == wanted


def test_a_rate_without_a_method_is_by_pixels_and_that_of_embeddings_by_evs(stack: Stack, automatic: Automatic) -> None:
    """By every door, also where the service has a threshold."""
    half, clip = Pruning(0.5), Video(data=BUSY)

    def encoded(part: Video, pruning: Pruning) -> Encoded:
        (made,) = asyncio.run(encode(stack.addresses["encoder"], part, pruning))
        return made

    def counted() -> list[float]:
        text, name = exported(automatic.generation.metrics_port), "gridsieve_generation_media_tokens_total"
        return [metric_in(text, name, method=method, pruning="before") for method in ("pixel_change", "evs")]

    whole, chosen, named = (encoded(clip, each) for each in (Pruning(), half, Pruning(0.5, "pixel_change")))
    tokens, embeds = whole.plan.grid.tokens, whole.as_embeds()
    by_evs = encoded(Video(embeds=embeds), half)
    assert (chosen.pruning.method, by_evs.pruning.method) == ("pixel_change", "evs")
    assert np.array_equal(chosen.kept, named.kept)
    for part, grown in ((clip, [tokens, 0]), (Video(embeds=embeds), [0, tokens])):
        before = counted()
        _, num_kept, _ = asyncio.run(asked_about(automatic, part, {"pruning_rate": 0.5}))
        assert (num_kept, [now - then for now, then in zip(counted(), before, strict=True)]) == (tokens // 2, grown)
    body = question(brought("video_embeds", embeds), pruning={"rate": 0.5})
    answer = httpx.post(f"{automatic.url}/v1/gridsieve/kept", json=body, trust_env=False).raise_for_status().json()
    assert answer["media"][0]["kept"] == by_evs.kept.tolist()


def test_the_services_threshold_and_where_each_method_acts_are_told_with_its_models(automatic: Automatic) -> None:
    async def models() -> Any:
        async with GridsieveClient(automatic.address) as client:
            return await client.models()

    (model,) = asyncio.run(models())
    assert (model.pruning_rate, model.pruning_method, model.pruning_threshold) == (RATE, "pixel_change", AUTO_THRESHOLD)
    before = {method: method == "pixel_change" for method in METHODS}
    assert {each.name: each.before_tower for each in model.pruning_methods} == before
    (model,) = httpx.get(f"{automatic.url}/v1/models", trust_env=False).json()["data"]
    assert model["pruning"] == {"rate": RATE, "method": "pixel_change", "threshold": AUTO_THRESHOLD}
    thresholds = {each["name"]: each["suggested_threshold"] for each in model["pruning_methods"]}
    assert thresholds == {method: AUTO_THRESHOLD if acts_before else None for method, acts_before in before.items()}
    assert f'"rate": {RATE}, "method": "pixel_change", "threshold": {AUTO_THRESHOLD}' in automatic.generation.log()
