"""A threshold in place of a rate, by every door: a still clip keeps its first slice, a busy one all that it may."""

from __future__ import annotations

import asyncio
import io
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest
from PIL import Image

from framesieve import FramesieveClient, Grid, Pruning, Video
from framesieve.cli.launcher import GATEWAY, SERVICES, LocalStack
from framesieve.common.contract.retention import AUTO_THRESHOLD, METHODS
from tests import media
from tests.integration.conftest import running
from tests.integration.gateway import data_url, question, video

SIDE_PX, FRAMES = 112, 8
RATE = 0.5
ABOVE_ANY_CHANGE = 0.9375
# Of a video: tokens before pruning, how many were kept, and the rate that came of it.
Counts: TypeAlias = tuple[Grid, int, float]


def clip(*seeds: int) -> bytes:
    """An animation of two frames a second, whose pixels are exact: the pictures of these seeds."""
    pictures = [Image.open(io.BytesIO(media.picture(SIDE_PX, SIDE_PX, seed))) for seed in seeds]
    for index, each in enumerate(pictures):
        each.putpixel((0, 0), (index, 0, 0))  # equal frames would be written as one
    file = io.BytesIO()
    pictures[0].save(file, "PNG", save_all=True, append_images=pictures[1:], duration=500)
    return file.getvalue()


STILL, BUSY = clip(*[0] * FRAMES), clip(*range(FRAMES))


@pytest.fixture(scope="module")
def automatic(tiny_checkpoint: Path) -> Iterator[LocalStack]:
    """Services that prune by a threshold where a request says nothing."""
    flags = ["--kv-cache-tokens", "2048", "--pruning-rate", str(RATE), "--pruning-threshold", str(AUTO_THRESHOLD)]
    with running(tiny_checkpoint, services=(*SERVICES, GATEWAY), flags={"generation": flags}) as started:
        yield started


def by_python(stack: LocalStack, data: bytes, pruning: Mapping[str, float], _: Path) -> Counts:
    async def asked() -> Counts:
        options: Any = {f"pruning_{name}": value for name, value in pruning.items()}
        async with FramesieveClient(stack.address) as client:
            usage = (await client.ask(Video(data=data), "What moves?", **options, max_new_tokens=1)).usage
        (item,) = usage.media
        assert usage.prompt_tokens_full - usage.prompt_tokens == item.grid.tokens - item.num_kept
        return item.grid, item.num_kept, item.pruning_rate

    return asyncio.run(asked())


def by_python_of_a_video(stack: LocalStack, data: bytes, pruning: Mapping[str, float], _: Path) -> Counts:
    async def asked() -> Counts:
        async with FramesieveClient(stack.address) as client:
            own = Video(data=data, pruning=Pruning(**pruning))  # type: ignore[arg-type]
            (item,) = (await client.ask(own, "What moves?", pruning_method="vcast", max_new_tokens=1)).usage.media
        return item.grid, item.num_kept, item.pruning_rate

    return asyncio.run(asked())


def by_command(stack: LocalStack, data: bytes, pruning: Mapping[str, float], folder: Path) -> Counts:
    (folder / "clip.png").write_bytes(data)
    flags = [f"--pruning-{name}={value}" for name, value in pruning.items()]
    command = [sys.executable, "-m", "framesieve", "ask", str(folder / "clip.png"), "What moves?", *flags]
    command += ["--server", stack.address, "--max-new-tokens", "1", "--json"]
    (item,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["usage"]["media"]
    return Grid(**item["grid"]), item["num_kept"], item["pruning_rate"]


def by_http(path: str) -> Callable[[LocalStack, bytes, Mapping[str, float], Path], Counts]:
    def asked(stack: LocalStack, data: bytes, pruning: Mapping[str, float], _: Path) -> Counts:
        url = data_url("image/png", data)
        body = question(video(url), "What moves?", max_tokens=1)
        if path == "/v1/responses":
            content = [{"type": "input_file", "file_data": url}, {"type": "input_text", "text": "What moves?"}]
            body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 1}
        told = httpx.post(f"{stack.url}{path}", json=body | {"pruning": pruning}, timeout=60, trust_env=False)
        answer = told.raise_for_status().json()
        (item,) = answer["media"] if "media" in answer else answer["usage"]["framesieve"]["media"]
        grid = Grid(**item["grid"])
        if "kept" in item:
            return grid, len(item["kept"]), 1 - len(item["kept"]) / grid.tokens
        return grid, item["kept_tokens"], item["pruning_rate"]

    return asked


DOORS = {
    "Python": by_python,
    "a video of its own": by_python_of_a_video,
    "the command": by_command,
    "chat completions": by_http("/v1/chat/completions"),
    "responses": by_http("/v1/responses"),
    "the kept tokens": by_http("/v1/framesieve/kept"),
}


def at_most(grid: Grid, rate: float) -> int:
    """What the rate leaves, but at least the first slice."""
    return max(grid.slice_tokens, math.floor(grid.tokens * (1 - rate)))


@pytest.mark.parametrize("door", DOORS)
def test_a_threshold_keeps_what_changed_and_usage_says_the_rate_that_came_of_it(
    automatic: LocalStack, tmp_path: Path, door: str
) -> None:
    for data, threshold, changed in (
        (STILL, AUTO_THRESHOLD, False),
        (BUSY, AUTO_THRESHOLD, True),
        (BUSY, ABOVE_ANY_CHANGE, False),
    ):
        grid, num_kept, rate = DOORS[door](automatic, data, {"rate": 0.25, "threshold": threshold}, tmp_path)
        assert grid.slice_tokens < at_most(grid, 0.25) < grid.tokens
        assert num_kept == (at_most(grid, 0.25) if changed else grid.slice_tokens)
        assert rate == pytest.approx(1 - num_kept / grid.tokens)


@pytest.mark.parametrize("door", ["Python", "the kept tokens"])
def test_a_request_that_says_nothing_gets_the_services_threshold_and_one_with_a_rate_none(
    automatic: LocalStack, tmp_path: Path, door: str
) -> None:
    def kept(data: bytes, **pruning: Any) -> tuple[Grid, int]:
        grid, num_kept, _ = DOORS[door](automatic, data, pruning, tmp_path)
        return grid, num_kept

    grid, of_busy = kept(BUSY)
    assert (kept(STILL)[1], of_busy) == (grid.slice_tokens, at_most(grid, RATE))
    assert kept(STILL, rate=0.25)[1] == at_most(grid, 0.25)
    assert kept(STILL, rate=0)[1] == grid.tokens
    assert kept(STILL, method="evs")[1] == grid.tokens // 2


def test_the_services_threshold_and_where_each_method_acts_are_told_with_its_models(automatic: LocalStack) -> None:
    async def models() -> Any:
        async with FramesieveClient(automatic.address) as client:
            return await client.models()

    (model,) = asyncio.run(models())
    assert (model.pruning_rate, model.pruning_method, model.pruning_threshold) == (RATE, "pixel_change", AUTO_THRESHOLD)
    before = {method: method == "pixel_change" for method in METHODS}
    assert {each.name: each.before_tower for each in model.pruning_methods} == before
    (told,) = httpx.get(f"{automatic.url}/v1/models", trust_env=False).json()["data"]
    assert told["pruning"] == {"rate": RATE, "method": "pixel_change", "threshold": AUTO_THRESHOLD}
    thresholds = {each["name"]: each["suggested_threshold"] for each in told["pruning_methods"]}
    assert thresholds == {method: AUTO_THRESHOLD if acts_before else None for method, acts_before in before.items()}
    assert f'"rate": {RATE}, "method": "pixel_change", "threshold": {AUTO_THRESHOLD}' in automatic.log("generation")
