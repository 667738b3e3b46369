"""Model families through three real processes: transformers' answers at rate 0, mixes of media, pruning, adapters."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gridsieve.client.client import GridsieveClient
from gridsieve.client.encoding import encode
from gridsieve.client.prompt import Image, Part, Pruning, Text, Video
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import Modality
from gridsieve.common.contract.retention import PIXEL_CHANGE
from gridsieve.families import families
from tests import media
from tests.drafts import write_mtp
from tests.families import FAMILIES, cosmos3_edge, load_reference
from tests.integration.before_tower import expect
from tests.integration.conftest import SEEING, another_generation
from tests.integration.fleet import Stack, running
from tests.integration.reference import NEW_TOKENS, check_answer, check_pruned_answer, model_inputs

QUESTION = "What moves?"
GREEDY: Any = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "logprobs": True, "timeout_s": 60}
# The others differ from these in a tower or a text model, which tests of the encoder and of generation cover; MiniCPM-V
# 4.7 has the text model of Qwen3.5.
DEEP = (
    *("cosmos3_edge", "glm4v", "glm46v", "glm4v_moe", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe"),
    "qwen3_vl_moe",
)
FAMILY_PARAMS = ["qwen2_5_vl", "qwen3_vl", *(pytest.param(name, marks=pytest.mark.deep) for name in DEEP)]


@dataclass(frozen=True)
class Served:
    """The services with a checkpoint of a family."""

    family: str
    folder: Path
    addresses: Mapping[str, str]


@pytest.fixture(scope="module", params=FAMILY_PARAMS)
def served(
    request: pytest.FixtureRequest, checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    family: str = request.param
    if family == "qwen2_5_vl":
        stack: Stack = request.getfixturevalue("stack")
        yield Served(family, request.getfixturevalue("tiny_checkpoint"), stack.addresses)
        return
    folder = checkpoints(family)
    if family == "cosmos3_edge":
        folder = cosmos3_edge.published(shutil.copytree(folder, tmp_path_factory.mktemp(family) / "published"))
    flags = {}
    if family.startswith("qwen3_5"):
        folder = write_mtp(shutil.copytree(folder, tmp_path_factory.mktemp(family) / "drafting"))
        flags["generation"] = ["--draft-model", "mtp"]
    with running(folder, flags=flags) as stack:
        yield Served(family, folder, stack.addresses)


@pytest.fixture
async def client(served: Served) -> AsyncIterator[GridsieveClient]:
    async with GridsieveClient(served.addresses["generation"]) as connected:
        yield connected


# --- transformers -------------------------------------------------------------------------------------------------

# Of clips of one second, transformers and our formula place the text after a video at the same positions.
BRIEF, BRIEF_WIDE = media.clip(8, fps=8, seed=3), media.clip(12, fps=12, width=160, height=96, seed=4)
PICTURE, TALL = media.picture(112, 84), media.picture(64, 128, seed=1)
MIXED = (Video(data=BRIEF, fps=8), Image(data=TALL), Text("and"), Video(data=BRIEF_WIDE, fps=6), Image(data=PICTURE))


async def test_at_rate_0_the_answer_is_that_of_transformers_generate(served: Served, client: GridsieveClient) -> None:
    await check_answers(served, client, load_reference(served.family, served.folder), MIXED[:2], MIXED)


async def check_answers(served: Served, client: GridsieveClient, reference: Any, *mixes: tuple[Part, ...]) -> None:
    """Compares answers about mixes of media with those of transformers' `generate`."""
    family, preprocessing = FAMILIES[served.family], served.addresses["preprocessing"]
    for parts in mixes:
        inputs = await model_inputs(preprocessing, parts, QUESTION, family, served.folder, reference.config)
        check_answer(await client.ask(list(parts), QUESTION, **GREEDY), reference, inputs)


ONLY_IMAGES = [
    name for name, each in FAMILIES.items() if Modality.VIDEO not in families()[each.model_type or name].media
]
IMAGES = (Image(data=PICTURE), Text("and"), Image(data=TALL), Image(data=media.picture(30, 31)))


# What is end to end here, the families with tiles share.
@pytest.mark.deep
@pytest.mark.parametrize("kind", ONLY_IMAGES)
async def test_models_of_images_answer_questions_about_them_as_transformers_generate(
    kind: str, checkpoints: Callable[[str], Path]
) -> None:
    folder, reference = checkpoints(kind), load_reference(kind, checkpoints(kind))
    with running(folder) as stack:
        async with GridsieveClient(stack.address) as client:
            await check_answers(Served(kind, folder, stack.addresses), client, reference, IMAGES[:1], IMAGES)
            with pytest.raises(InvalidRequest, match="video is not supported: this model takes images only"):
                await client.ask(Video(data=BRIEF), QUESTION)


TILED = [
    "llava_onevision",
    *(
        pytest.param(name, marks=pytest.mark.deep)
        for name in ("internvl", "internvl_qwen3_moe", "llava_next_video", "video_llama_3")
    ),
    *(
        pytest.param(name, marks=pytest.mark.deep)
        for name, each in FAMILIES.items()
        if each.inputs and name not in ONLY_IMAGES
    ),
]
# An image alone is in tiles: here so many that their tokens are shrunk.
TILED_MIXES: tuple[tuple[Part, ...], ...] = (
    (Image(data=media.picture(400, 380)),),
    (Image(data=PICTURE), Text("and"), Image(data=TALL), Video(data=BRIEF_WIDE, fps=6)),
)


@pytest.mark.parametrize("name", TILED)
async def test_models_with_tiles_and_pooled_videos_answer_as_transformers_generate(
    name: str, checkpoints: Callable[[str], Path]
) -> None:
    folder, reference = checkpoints(name), load_reference(name, checkpoints(name))
    with running(folder) as stack:
        addresses = stack.addresses
        async with GridsieveClient(addresses["generation"]) as client:
            await check_answers(Served(name, folder, addresses), client, reference, *TILED_MIXES)
            video = Video(data=BRIEF, fps=8)
            inputs = await model_inputs(
                addresses["preprocessing"], [video], QUESTION, FAMILIES[name], folder, reference.config
            )
            pad_id = getattr(reference.config, "video_token_id", reference.config.image_token_id)
            for method in ("evs", "evs_causal"):
                pruning = Pruning(0.5, method)
                pruned = await client.ask(replace(video, pruning=pruning), QUESTION, **GREEDY)
                (item,) = pruned.usage.media
                expected = 4 + 2 * (item.grid.t - 1) if method == "evs_causal" else item.grid.tokens // 2
                assert (item.grid.slice_tokens, item.num_kept) == (4, expected)
                (encoded,) = await encode(addresses["encoder"], video, pruning)
                check_pruned_answer(pruned, reference, inputs, pad_id, encoded)


async def test_concurrent_requests_with_and_without_adapters_answer_as_peft_and_transformers_do(
    stack: Stack, tiny_checkpoint: Path, adapted: dict[Path, Any]
) -> None:
    parts, reference = MIXED[:2], load_reference("qwen2_5_vl", tiny_checkpoint)
    family, preprocessing = FAMILIES["qwen2_5_vl"], stack.addresses["preprocessing"]
    inputs = await model_inputs(preprocessing, parts, QUESTION, family, tiny_checkpoint, reference.config)
    models = {None: reference} | {folder.name: model for folder, model in adapted.items()}
    async with GridsieveClient(stack.address) as client:
        names = [*models, *models]  # each twice: the second hits the prefix cache of its own adapter
        answers = await asyncio.gather(*(client.ask(parts, QUESTION, adapter=name, **GREEDY) for name in names))
    firsts = [check_answer(answer, models[name], inputs) for name, answer in zip(names, answers, strict=True)]
    for one, other in combinations(firsts[: len(models)], 2):
        assert float((one - other).abs().max()) > 0.01, "adapters that change nothing prove nothing"


async def test_an_adapter_of_the_tower_that_the_encoder_lacks_is_refused_with_its_name(
    stack: Stack, tiny_checkpoint: Path, adapted: dict[Path, Any], tmp_path: Path
) -> None:
    (folder,) = (each for each in adapted if each.name == SEEING)
    with another_generation(stack, tiny_checkpoint, tmp_path, "--adapters", f"blind={folder}") as generation:
        async with GridsieveClient(generation.address) as client:
            with pytest.raises(InvalidRequest, match=f"must be one of {SEEING}, got 'blind'") as refused:
                await client.ask(MIXED[:1], QUESTION, adapter="blind")
            assert refused.value.field == "adapter"
            assert (await client.ask(None, QUESTION, adapter="blind", max_new_tokens=1)).token_ids


# --- pruning ------------------------------------------------------------------------------------------------------

SHORT = media.clip(seed=1)


async def test_each_video_is_pruned_by_its_own_method_and_rate_or_else_by_those_of_the_request(
    stack: Stack,
) -> None:
    prunings = (None, Pruning(0.5, "random"), Pruning(0.95, "evs"), Pruning(0.95, "vidcom2"), Pruning(0.95, "none"))
    videos = [Video(data=SHORT, pruning=pruning) for pruning in prunings]
    async with GridsieveClient(stack.address) as client:
        answer = await client.ask(videos, QUESTION, pruning_rate=0.25, max_new_tokens=1, timeout_s=60)
    grid = answer.usage.media[0].grid
    twentieth = grid.tokens // 20
    assert [item.num_kept for item in answer.usage.media] == [
        *(grid.tokens * 3 // 4, grid.tokens // 2),
        *(max(grid.slice_tokens, twentieth), max(grid.t, twentieth), grid.tokens),
    ]


# --- tokens chosen before the tower -------------------------------------------------------------------------------

CHOICES = [
    Pruning(0.75, PIXEL_CHANGE),
    Pruning(0.0, PIXEL_CHANGE, threshold=0.3),
    Pruning(0.5, PIXEL_CHANGE, threshold=0.1),
]
# 27 frames: the last slice has one.
ODD = media.clip(27, fps=8, width=160, height=96, seed=5)


async def test_the_law_holds_where_tokens_are_chosen_before_the_tower(served: Served, client: GridsieveClient) -> None:
    """Choices of two clips at once, and again, when the prompts are cached."""
    reference, family = load_reference(served.family, served.folder), FAMILIES[served.family]
    videos = [Video(data=ODD, fps=8, pruning=each) for each in CHOICES]
    videos += [Video(data=SHORT, fps=4, pruning=each) for each in CHOICES[:2]]
    addresses, of_family = served.addresses, (QUESTION, reference, family, served.folder)
    expected = [await expect(addresses["preprocessing"], each, *of_family) for each in videos]
    assert len({len(each.kept) for each in expected}) > 3, "choices that are equal prove little"
    for again in (False, True):
        answers = await asyncio.gather(*(client.ask(each, QUESTION, **GREEDY) for each in videos))
        for each, answer in zip(expected, answers, strict=True):
            each.check(answer, reference)
            assert not again or answer.usage.cached_prompt_tokens > answer.usage.prompt_tokens // 2
    for video, each in zip(videos, expected, strict=True):
        (found,) = await encode(addresses["encoder"], video, video.pruning or Pruning())
        assert found.kept.tolist() == each.kept
        np.testing.assert_allclose(found.values, each.embeds, atol=1e-5)
