"""Model families through three real processes: mixes of media, pruning methods, and transformers' answers at rate 0."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.channels import open_channel
from common.contract import errors
from common.contract.plan import Grid, MediaPlan, Modality, PromptPlan
from common.contract.retention import Pruning
from common.contract.wire import PlanReceiver
from framesieve.cli.launcher import LocalStack
from framesieve.client.client import FramesieveClient
from framesieve.client.encoding import encode
from framesieve.client.messages import prompt_message
from framesieve.client.prompt import Image, Message, Text, Video
from framesieve.v1 import prompt_pb2
from framesieve.v1.preprocessing_pb2 import PreprocessRequest
from framesieve.v1.preprocessing_pb2_grpc import PreprocessingServiceStub
from tests import media
from tests.families import FAMILIES, FamilyUnderTest, load_reference
from tests.integration.conftest import running

# Below this distance of the two best logits, either token is right.
CLEAR_MARGIN = 2e-4

# The mixture of experts differs from Qwen3-VL in the text model alone, which tests of generation cover.
FAMILY_PARAMS = ["qwen2_5_vl", "qwen3_vl", pytest.param("qwen3_vl_moe", marks=pytest.mark.deep)]


@dataclass(frozen=True)
class Served:
    """The services with a checkpoint of a family."""

    family: str
    folder: Path
    addresses: Mapping[str, str]


@pytest.fixture(scope="module", params=FAMILY_PARAMS)
def served(request: pytest.FixtureRequest, checkpoints: Callable[[str], Path]) -> Iterator[Served]:
    family: str = request.param
    if family == "qwen2_5_vl":
        stack: LocalStack = request.getfixturevalue("stack")
        yield Served(family, request.getfixturevalue("checkpoint"), stack.addresses)
        return
    with running(checkpoints(family)) as stack:
        yield Served(family, checkpoints(family), stack.addresses)


@pytest.fixture
async def client(served: Served) -> AsyncIterator[FramesieveClient]:
    async with FramesieveClient(served.addresses["generation"]) as connected:
        yield connected


# --- mixes of media -----------------------------------------------------------------------------------------------

SHORT, WIDE = media.clip(seed=1), media.clip(24, fps=8, width=160, height=96, seed=2)
PICTURE, TALL = media.picture(112, 84), media.picture(64, 128, seed=1)
MIXES: dict[str, tuple[tuple[Message, ...], tuple[Image | Video | Text, ...]]] = {
    "no media": ((), ()),
    "an image before a video": ((), (Image(data=PICTURE), Video(data=SHORT))),
    "a video before an image": ((), (Video(data=SHORT), Text("and"), Image(data=TALL))),
    "videos of different sizes and rates of sampling": (
        (),
        (Video(data=SHORT, fps=1), Video(data=WIDE, fps=4), Video(data=SHORT, fps=2, max_frames=6)),
    ),
    "twenty images": ((), tuple(Image(data=media.picture(64, 96, seed=seed)) for seed in range(20))),
    "media in earlier turns": (
        (
            Message("system", (Text("Be brief."),)),
            Message("user", (Video(data=WIDE), Image(data=PICTURE), Text("What moves?"))),
            Message("assistant", (Text("A square."),)),
        ),
        (Image(data=TALL), Video(data=SHORT)),
    ),
}


@pytest.mark.parametrize("rate", [0.0, 0.75])
@pytest.mark.parametrize("mix", MIXES)
async def test_every_mix_of_media_keeps_the_tokens_of_its_rate(client: FramesieveClient, mix: str, rate: float) -> None:
    history, parts = MIXES[mix]
    answer = await client.ask(
        list(parts), "What is this?", history=history, pruning_rate=rate, max_new_tokens=3, timeout_s=60
    )
    asked = [part for turn in history for part in turn.parts] + list(parts)
    modalities = {Image: Modality.IMAGE, Video: Modality.VIDEO}
    assert [item.modality for item in answer.usage.media] == [
        modalities[type(part)] for part in asked if not isinstance(part, Text)
    ]
    for item in answer.usage.media:
        whole = item.modality is Modality.IMAGE or not rate
        assert item.kept_tokens == (item.grid.tokens if whole else max(item.grid.slice_tokens, item.grid.tokens // 4))
    assert answer.usage.completion_tokens >= 1


@pytest.mark.parametrize(
    ("method", "least"),
    [("evs", "a slice"), ("vidcom2", "a token a slice"), ("random", "a slice"), ("none", "everything")],
)
async def test_every_method_keeps_at_least_its_floor(client: FramesieveClient, method: str, least: str) -> None:
    answer = await client.ask(
        Video(data=SHORT), "What moves?", pruning_rate=0.95, pruning_method=method, max_new_tokens=1, timeout_s=60
    )
    (item,) = answer.usage.media
    floors = {"a slice": item.grid.slice_tokens, "a token a slice": item.grid.t, "everything": item.grid.tokens}
    assert item.kept_tokens == max(floors[least], item.grid.tokens * 5 // 100)


async def test_the_rate_of_a_video_overrides_that_of_the_request(client: FramesieveClient) -> None:
    own = Video(data=SHORT, pruning=Pruning(0.5, "vidcom2"))
    answer = await client.ask(
        [own, Video(data=SHORT)], "What moves?", pruning_rate=0.25, max_new_tokens=1, timeout_s=60
    )
    tokens = answer.usage.media[0].grid.tokens
    assert [item.kept_tokens for item in answer.usage.media] == [tokens // 2, tokens * 3 // 4]


async def test_an_unknown_method_is_refused_with_the_list_of_methods(client: FramesieveClient) -> None:
    with pytest.raises(errors.InvalidRequest, match="evs, vidcom2, random, none"):
        await client.ask(Video(data=SHORT), "What moves?", pruning_rate=0.5, pruning_method="best", timeout_s=60)


# --- transformers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preprocessed:
    """The plan of a prompt, and the frames of each item: uint8 [frames, H, W, 3]."""

    plan: PromptPlan
    frames: list[NDArray[np.uint8]]


async def preprocess(address: str, messages: list[Message]) -> Preprocessed:
    requests = [
        PreprocessRequest(prompt=prompt_message(messages)),
        PreprocessRequest(select=prompt_pb2.Select(all=True)),
    ]
    receiver, plan, pixels = PlanReceiver(), None, {}
    async with open_channel(address) as channel:
        async for response in PreprocessingServiceStub(channel).Preprocess(iter(requests)):
            if response.HasField("plan"):
                plan = receiver.add(response.plan) or plan
            else:
                chunk = response.frames
                pixels.setdefault(chunk.media_index, bytearray()).extend(chunk.chunk.data)
    assert plan is not None
    shapes = [(item.frames, item.frame_height_px, item.frame_width_px, 3) for item in plan.media]
    return Preprocessed(
        plan, [np.frombuffer(pixels[index], np.uint8).reshape(shape) for index, shape in enumerate(shapes)]
    )


def model_inputs(family: FamilyUnderTest, folder: Path, asked: Preprocessed, config: Any) -> dict[str, Tensor]:
    """The inputs that transformers' processor makes of the same ids and frames."""
    ids = torch.from_numpy(asked.plan.input_ids.astype(np.int64))[None]
    types = torch.zeros_like(ids)
    types[ids == config.image_token_id] = 1
    types[ids == config.video_token_id] = 2
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types}
    for modality, pixels, grids in (
        (Modality.IMAGE, "pixel_values", "image_grid_thw"),
        (Modality.VIDEO, "pixel_values_videos", "video_grid_thw"),
    ):
        items = [index for index, item in enumerate(asked.plan.media) if item.modality is modality]
        if items:
            patches = [
                media.normalised_patches(
                    asked.frames[index], folder, family.patch_px, family.merge, family.temporal_patch
                )
                for index in items
            ]
            inputs[pixels] = torch.cat(patches)
            inputs[grids] = torch.tensor([patch_grid(asked.plan.media[index], family.merge) for index in items])
    bases = [float(item.seconds_per_grid) for item in asked.plan.media if item.seconds_per_grid]
    if bases and not family.slices_stand_alone:
        inputs["second_per_grid_ts"] = torch.tensor(bases)
    return inputs


def patch_grid(item: MediaPlan, merge: int) -> tuple[int, int, int]:
    grid: Grid = item.grid
    return grid.t, grid.h * merge, grid.w * merge


# Of clips of one second, transformers and our formula place the text after a video at the same positions.
BRIEF, BRIEF_WIDE = media.clip(8, fps=8, seed=3), media.clip(12, fps=12, width=160, height=96, seed=4)
BRIEF_MIXES: dict[str, tuple[Image | Video | Text, ...]] = {
    "a video before an image": (Video(data=BRIEF, fps=8), Image(data=TALL)),
    "an image before a video": (Image(data=PICTURE), Text("and"), Video(data=BRIEF_WIDE)),
    "two videos": (Video(data=BRIEF), Video(data=BRIEF_WIDE, fps=6)),
}


@pytest.mark.parametrize("mix", BRIEF_MIXES)
async def test_at_rate_0_the_answer_is_that_of_transformers_generate(
    served: Served, client: FramesieveClient, mix: str
) -> None:
    parts = BRIEF_MIXES[mix]
    messages = [Message("user", (*parts, Text("What moves?")))]
    asked = await preprocess(served.addresses["preprocessing"], messages)
    reference = load_reference(served.family, served.folder)
    generated = reference.generate(
        **model_inputs(FAMILIES[served.family], served.folder, asked, reference.config),
        max_new_tokens=8,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(generated.logits)
    best, second = logits.topk(2, dim=-1).values.T
    assert (best - second > CLEAR_MARGIN).all(), "choose another clip: a tie proves nothing"
    answer = await client.ask(list(parts), "What moves?", max_new_tokens=8, temperature=0, logprobs=True, timeout_s=60)
    expected = generated.sequences[0, asked.plan.tokens :]
    assert list(answer.token_ids) == expected.tolist()
    logprobs = logits.log_softmax(dim=-1).gather(1, expected[:, None])[:, 0]
    assert answer.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)


# --- embeddings as input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["evs", "vidcom2", "random"])
async def test_embeddings_as_input_are_answered_like_the_media_they_come_from(
    served: Served, client: FramesieveClient, method: str
) -> None:
    clip, picture = await encode(served.addresses["encoder"], [Video(data=WIDE), Image(data=PICTURE)])
    answers = [
        await client.ask(
            list(parts),
            "What moves?",
            pruning_rate=0.5,
            pruning_method=method,
            max_new_tokens=6,
            temperature=0,
            logprobs=True,
            timeout_s=60,
        )
        for parts in (
            (Video(data=WIDE), Image(data=PICTURE)),
            (Video(embeds=clip.as_embeds()), Image(embeds=picture.as_embeds())),
        )
    ]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].logprobs == pytest.approx(answers[1].logprobs, abs=1e-4)
    assert [item.kept_tokens for item in answers[0].usage.media] == [
        item.kept_tokens for item in answers[1].usage.media
    ]


async def test_embeddings_of_a_video_without_times_are_refused(served: Served, client: FramesieveClient) -> None:
    (clip,) = await encode(served.addresses["encoder"], Video(data=SHORT))
    timeless = replace(clip.as_embeds(), seconds_per_slice=None, timestamps_s=())
    with pytest.raises(errors.InvalidRequest, match="seconds_per_grid or timestamps_s"):
        await client.ask(Video(embeds=timeless), "What moves?", timeout_s=60)
