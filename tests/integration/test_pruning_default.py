"""Generation's own pruning: of requests that say nothing, only a rate or only a method, by gRPC and by HTTP."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import httpx
import pytest

from framesieve import FramesieveClient, Grid, Image, Pruning, Video
from framesieve.cli.launcher import GATEWAY, SERVICES, LocalStack
from tests import media
from tests.integration.conftest import running
from tests.integration.gateway import data_url, image, question, video

CLIP, PICTURE = media.clip(16, fps=4), media.picture(64, 48)
CLIP_URL, PICTURE_URL = data_url("video/mp4", CLIP), data_url("image/png", PICTURE)
RATE, METHOD = 0.95, "vidcom2"
NOTHING = Pruning()
# What the request says, what its video says, and the rate and the method that follow.
SAID = {
    "nothing": (NOTHING, NOTHING, RATE, METHOD),
    "a rate of 0": (Pruning(0.0), NOTHING, 0.0, METHOD),
    "a rate": (Pruning(0.5), NOTHING, 0.5, METHOD),
    "a method": (Pruning(method="evs"), NOTHING, RATE, "evs"),
    "to keep all": (Pruning(method="none"), NOTHING, RATE, "none"),
    "a rate of 0 of the video": (NOTHING, Pruning(0.0), 0.0, METHOD),
    "a rate, and the video a method": (Pruning(0.6), Pruning(method="evs_causal"), 0.6, "evs_causal"),
}


@pytest.fixture(scope="module")
def pruned(tiny_checkpoint: Any) -> Iterator[LocalStack]:
    flags = ["--kv-cache-tokens", "2048", "--pruning-rate", str(RATE), "--pruning-method", METHOD]
    with running(tiny_checkpoint, services=(*SERVICES, GATEWAY), flags={"generation": flags}) as stack:
        yield stack


def expected(grid: Grid, rate: float, method: str) -> int:
    share = 1 - Fraction(str(rate))
    if method == "evs_causal":
        return grid.slice_tokens + (grid.t - 1) * math.floor(grid.slice_tokens * share)
    least = {"evs": grid.slice_tokens, "vidcom2": grid.t, "none": grid.tokens}[method]
    return max(least, math.floor(grid.tokens * share))


@pytest.mark.parametrize("name", SAID)
async def test_what_a_request_does_not_say_is_as_the_service_was_told(pruned: LocalStack, name: str) -> None:
    of_request, of_video, rate, method = SAID[name]
    async with FramesieveClient(pruned.address) as client:
        parts = [Video(data=CLIP, pruning=of_video), Image(data=PICTURE)]
        options = {"pruning_rate": of_request.rate, "pruning_method": of_request.method}
        answer = await client.ask(parts, "What moves?", **options, max_new_tokens=1)  # type: ignore[arg-type]
    grid, whole = (item.grid for item in answer.usage.media)
    wanted = [expected(grid, rate, method), whole.tokens]
    assert [item.num_kept for item in answer.usage.media] == wanted
    assert len({expected(grid, *case[2:]) for case in SAID.values()}) == 5  # the cases can be told apart
    body = question(video(CLIP_URL, pruning=asdict(of_video)), image(PICTURE_URL), "What moves?", max_tokens=1)
    async with httpx.AsyncClient(base_url=pruned.url, timeout=60, trust_env=False) as http:
        for path in ("/v1/chat/completions", "/v1/framesieve/kept"):
            got = (await http.post(path, json=body | {"pruning": asdict(of_request)})).raise_for_status().json()
            told = got.get("usage", {}).get("framesieve", {}).get("media")
            found = [each["kept_tokens"] for each in told] if told else [len(each["kept"]) for each in got["media"]]
            assert found == wanted


async def test_the_services_pruning_is_told_with_its_models_and_in_its_log(pruned: LocalStack) -> None:
    async with FramesieveClient(pruned.address) as client:
        (model,) = await client.models()
    assert (model.pruning_rate, model.pruning_method) == (RATE, METHOD)
    (told,) = httpx.get(f"{pruned.url}/v1/models", trust_env=False).json()["data"]
    assert told["pruning"] == {"rate": RATE, "method": METHOD, "threshold": None}
    assert f'"rate": {RATE}, "method": "{METHOD}"' in pruned.log("generation")
