"""What an answer attended to, at every door: gRPC by the Python client, HTTP, the command, and where it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Picture
from transformers import AutoConfig
from typer.testing import CliRunner

from gridsieve import GridsieveClient, InvalidRequest, Video
from gridsieve.__main__ import app
from gridsieve.client.prompt import Image
from tests import media
from tests.families import FAMILIES, load_reference
from tests.integration.fleet import Stack
from tests.integration.gateway import Gateway, data_url, question, video
from tests.integration.reference import model_inputs

FPS = 4
CLIP = media.clip(8, fps=FPS)
WHOLE, PHOTO = Video(data=CLIP, fps=FPS), Image(data=media.picture(56, 84))
TOKENS = 6


async def test_weights_are_those_of_transformers_whole_model(
    client: GridsieveClient, stack: Stack, tiny_checkpoint: Path
) -> None:
    """Of a video and an image, from their files on: nothing is pruned."""
    answer = await client.ask([WHOLE, PHOTO], "What moves?", attention=True, temperature=0, max_new_tokens=TOKENS)
    found, model = answer.attention, load_reference("qwen2_5_vl", tiny_checkpoint)
    assert found is not None
    config = AutoConfig.from_pretrained(tiny_checkpoint)
    inputs = await model_inputs(
        *(stack.addresses["preprocessing"], [WHOLE, PHOTO], "What moves?", FAMILIES["qwen2_5_vl"]),
        *(tiny_checkpoint, config),
    )
    ids, types = inputs["input_ids"], inputs["mm_token_type_ids"]
    said = torch.tensor([answer.token_ids[:-1]])
    inputs["input_ids"] = torch.cat([ids, said], dim=1)
    inputs["mm_token_type_ids"] = torch.cat([types, torch.zeros_like(said)], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        layers = model(**inputs, output_attentions=True, use_cache=False).attentions
    rows = torch.stack(layers).mean(dim=(0, 1, 2))[ids.shape[1] - 1 :].numpy()  # [n, all tokens]
    assert len(rows) == len(found.tokens) == len(answer.token_ids)
    for item, kind in zip(found.media, (2, 1), strict=True):
        expected = rows[:, np.flatnonzero(types[0].numpy() == kind)]
        assert item.kept.tolist() == [*range(item.grid.tokens)]
        assert item.token_weights is not None
        np.testing.assert_allclose(item.token_weights, expected, atol=1e-4)
        np.testing.assert_allclose(item.weights.reshape(-1), expected.mean(axis=0), atol=1e-4)
        np.testing.assert_allclose(item.token_shares, expected.sum(axis=1), atol=1e-4)
        np.testing.assert_allclose(item.of_token(1).reshape(-1), expected[1], atol=1e-4)
    assert found.text_share == pytest.approx(1 - sum(item.share for item in found.media), abs=1e-5)


async def test_pruned_tokens_have_no_weight_and_the_answer_is_the_same(client: GridsieveClient) -> None:
    options: dict[str, Any] = {"pruning_rate": 0.5, "pruning_method": "evs", "n": 2, "seed": 3, "temperature": 1.0}
    plain = await client.ask(WHOLE, "What moves?", max_new_tokens=TOKENS, **options)
    answer = await client.ask(WHOLE, "What moves?", max_new_tokens=TOKENS, attention=True, **options)
    assert [each.token_ids for each in answer.choices] == [each.token_ids for each in plain.choices]
    assert plain.attention is None
    first, second = (choice.attention for choice in answer.choices)
    assert first is not None
    assert second is not None
    (item,) = first.media
    assert item.weights.shape == (item.grid.t, item.grid.h, item.grid.w)
    assert (item.weights > 0).sum() == item.kept.size == answer.usage.media[0].num_kept < item.grid.tokens
    assert not np.array_equal(item.weights, second.media[0].weights)


def test_over_http_a_choice_tells_it(door: Gateway) -> None:
    clip = video(data_url("video/mp4", CLIP), mm_processor_kwargs={"fps": FPS})
    body = question(clip, "What moves?", pruning={"rate": 0.5, "method": "evs"}, attention=True)
    with door.http() as http:
        (choice,) = http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"]
        streamed = http.post("/v1/chat/completions", json=body | {"stream": True}).raise_for_status().text
        (plain,) = (
            http.post("/v1/chat/completions", json=body | {"attention": None}).raise_for_status().json()["choices"]
        )
    chunks = [json.loads(line[6:])["choices"][0] for line in streamed.splitlines() if line.startswith("data: {")]
    assert plain == {name: value for name, value in choice.items() if name != "attention"}
    told = choice["attention"]
    assert [each["attention"] for each in chunks if each["finish_reason"]] == [told]
    assert not any("attention" in each for each in chunks if not each["finish_reason"])
    (item,) = told["media"]
    assert len(item["weights"]) == len(item["kept"]) < item["grid"]["t"] * item["grid"]["h"] * item["grid"]["w"]
    assert sum(item["weights"]) + told["text_share"] == pytest.approx(1, abs=1e-4)
    assert np.mean(item["token_weights"], axis=0) == pytest.approx(item["weights"], abs=1e-5)
    assert np.sum(item["token_weights"], axis=1) == pytest.approx(item["token_shares"], abs=1e-4)
    assert len(told["tokens"]) == len(item["token_shares"])


def test_the_command_draws_it(stack: Stack, tmp_path: Path) -> None:
    clip, drawn = tmp_path / "clip.mp4", tmp_path / "attention.png"
    clip.write_bytes(CLIP)
    flags = [f"--{name}={address}" for name, address in stack.addresses.items()]
    flags += ["--fps", str(FPS), "--pruning-rate", "0.5", "--answer", "What moves?", "--max-new-tokens", str(TOKENS)]
    result = CliRunner().invoke(app, ["inspect", str(clip), *flags, "-o", str(drawn), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert len(told["attention"]["weights"]) == told["kept_tokens"] < told["tokens"]
    assert told["attention"]["media_share"] == pytest.approx(sum(told["attention"]["weights"]), abs=1e-5)
    with Picture.open(drawn) as picture:
        assert picture.format == "PNG"


async def test_a_live_session_refuses_it(live_stack: Stack) -> None:
    async with GridsieveClient(live_stack.address) as client, client.live() as session:
        with pytest.raises(InvalidRequest, match=r"attention must be false in a live session, got True"):
            await session.answer("What moves?", attention=True)
