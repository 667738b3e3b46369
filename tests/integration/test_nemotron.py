"""Nemotron through three real processes: answers, kept tokens and log-probabilities are those of transformers.

Its own forward prunes by EVS, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import compute_retention_mask

from gridsieve.client.answer import Answer
from gridsieve.client.client import GridsieveClient
from gridsieve.client.encoding import encode
from gridsieve.client.messages import generate_request
from gridsieve.client.prompt import Audio, Image, Part, Pruning, Text, Video, user_turn
from gridsieve.common.contract.errors import InvalidRequest
from tests import media
from tests.families import load_reference, nemotron, nemotron_nano
from tests.integration.fleet import Stack, running
from tests.integration.reference import NEW_TOKENS, check_answer, plan_and_frames

QUESTION = "What moves?"
GREEDY: Any = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "logprobs": True, "timeout_s": 60}
TRAINED_RATE = 0.7
CLIP, ODD = media.clip(16, fps=8, seed=3), media.clip(11, fps=8, width=160, height=96, seed=4)
MIXES: dict[str, tuple[Part, ...]] = {
    "an odd number of frames": (Video(data=ODD, fps=8),),
    "two videos": (Video(data=CLIP, fps=4), Text("and"), Video(data=media.clip(16, fps=8, seed=5), fps=4)),
    "two images": (Image(data=media.picture(112, 84)), Text("and"), Image(data=media.picture(64, 128, seed=1))),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a checkpoint whose time steps are not clamped: `generate` does not clamp those of its answer."""
    folder = tmp_path_factory.mktemp("nemotron")
    nemotron.write(folder, 7, text={"time_step_min": 1e-6}, config={"video_pruning_rate": TRAINED_RATE})
    return folder


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    with running(folder) as stack:
        yield stack


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return load_reference("nemotron_h_omni", folder)


async def inputs_of(stack: Stack, parts: Sequence[Part], slice_frames: int = nemotron.TUBELET) -> dict[str, Tensor]:
    """The model's inputs, from the ids and frames of preprocessing."""
    prompt = generate_request([user_turn(list(parts), QUESTION)], {}).prompt
    return nemotron.model_inputs(*await plan_and_frames(stack.addresses["preprocessing"], prompt), slice_frames)


@pytest.mark.parametrize("mix", MIXES)
async def test_at_rate_0_the_answer_is_that_of_transformers_generate(stack: Stack, reference: Any, mix: str) -> None:
    reference.video_pruning_rate = 0.0
    async with GridsieveClient(stack.addresses["generation"]) as client:
        answer = await client.ask(list(MIXES[mix]), QUESTION, pruning_rate=0, **GREEDY)
    check_answer(answer, reference, await inputs_of(stack, MIXES[mix]))


@torch.no_grad()
def pruned(reference: Any, inputs: dict[str, Tensor], answer: Tensor, rate: float) -> tuple[list[int], Tensor, int]:
    """The kept tokens of the one video, the log-probabilities after the prompt and each token of an answer but the
    last, and the length of the pruned prompt."""
    videos = inputs["pixel_values_videos"]
    (features,) = reference.get_video_features(videos).pooler_output
    kept: list[int] = torch.nonzero(compute_retention_mask(features, videos.shape[1], rate))[:, 0].tolist()
    ids = torch.cat([inputs["input_ids"], answer[None, :-1]], dim=1)
    reference.video_pruning_rate = rate
    logits = reference(**inputs | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}).logits[0]
    return kept, logits[-len(answer) :].log_softmax(dim=-1), len(logits) - len(answer) + 1


@pytest.mark.parametrize("rate", [0.5, TRAINED_RATE, 0.9])
async def test_pruned_answers_are_those_of_transformers_own_pruned_forward(
    stack: Stack, reference: Any, rate: float
) -> None:
    """The rate of the checkpoint's config needs no naming."""
    video = Video(data=ODD, fps=8)
    async with GridsieveClient(stack.addresses["generation"]) as client:
        named: Any = {} if rate == TRAINED_RATE else {"pruning_rate": rate}
        answer = await client.ask(video, QUESTION, **named, **GREEDY)
    await check_pruned(stack, reference, video, answer, rate)


async def check_pruned(
    stack: Stack, reference: Any, video: Video, answer: Answer, rate: float, slice_frames: int = nemotron.TUBELET
) -> None:
    (encoded,) = await encode(stack.addresses["encoder"], video, pruning=Pruning(rate))
    inputs = await inputs_of(stack, (video,), slice_frames)
    kept, logprobs, tokens = pruned(reference, inputs, torch.tensor(answer.token_ids), rate)
    assert encoded.kept.tolist() == kept
    assert answer.usage.prompt_tokens == tokens
    assert logprobs.argmax(dim=-1).tolist() == list(answer.token_ids)
    assert answer.logprobs == pytest.approx(logprobs.max(dim=-1).values.tolist(), abs=1e-4)


# Of 1.2 s the last token has the masked frame alone, of which transformers makes another embedding beside other sounds.
SPOKEN, SUNG = (media.with_sound(CLIP, media.chirp(1.2)), media.with_sound(ODD, media.chirp(2.55, seed=1)))
BELL, PICTURE = Audio(data=media.sound(media.chirp(1.25, seed=2))), Image(data=media.picture(112, 84))
HEARD: dict[str, tuple[Part, ...]] = {
    "a sound": (Audio(data=SPOKEN),),
    "sounds and an image": (BELL, PICTURE, Text("and"), Audio(data=SUNG, start_s=0.5)),
    "a clip with its sound": (Video(data=SPOKEN, fps=8, audio=True),),
    "a clip with its sound, and a sound": (Video(data=SUNG, fps=8, audio=True), Text("and"), BELL),
}
MIXED = (PICTURE, Video(data=SUNG, fps=4, audio=True), BELL, Text("and"), Video(data=SPOKEN, fps=8, audio=True))


@pytest.mark.deep  # tests of the encoder and of preprocessing cover what sounds are
async def test_answers_about_sounds_and_clips_with_their_sound_are_those_of_transformers(
    stack: Stack, reference: Any
) -> None:
    reference.video_pruning_rate = 0.0
    said = []
    async with GridsieveClient(stack.addresses["generation"]) as client:
        for mix in HEARD.values():
            answer = await client.ask(list(mix), QUESTION, pruning_rate=0, **GREEDY)
            check_answer(answer, reference, await inputs_of(stack, mix))
            said.append(answer.logprobs)
        (silent, other) = [
            await client.ask(Video(data=each, fps=8, audio=heard), QUESTION, pruning_rate=0, **GREEDY)
            for each, heard in ((SPOKEN, False), (media.with_sound(CLIP, media.chirp(1.2, seed=5)), True))
        ]
        assert min(abs(each.logprobs[0] - said[2][0]) for each in (silent, other)) > 0.001
        for pruning in (
            Pruning(TRAINED_RATE),
            Pruning(0.5, "pixel_change"),
            Pruning(0.0, "pixel_change", threshold=0.1),
        ):
            mix = tuple(replace(each, pruning=pruning) if isinstance(each, Video) else each for each in MIXED)
            for again in (False, True):
                answer = await client.ask(list(mix), QUESTION, **GREEDY)
                await check_law(stack, reference, mix, answer)
                assert not again or answer.usage.cached_prompt_tokens > 0
        with pytest.raises(InvalidRequest, match=r"video\.audio is not possible: the file has no sound track"):
            await client.ask(Video(data=CLIP, audio=True), QUESTION)


async def check_law(stack: Stack, reference: Any, parts: Sequence[Part], answer: Answer) -> None:
    """Compares an answer with one forward over what is kept, whose embeddings transformers makes item by item. Of a
    video whose tokens were chosen before the tower, the encoder's are taken."""
    prompt = generate_request([user_turn(list(parts), QUESTION)], {}).prompt
    plan, frames = await plan_and_frames(stack.addresses["preprocessing"], prompt)
    ids, said = torch.from_numpy(plan.input_ids).long(), torch.tensor(answer.token_ids)
    embeds = reference.get_input_embeddings()(torch.cat([ids, said[:-1]])).detach()
    taken, num_kept = torch.ones(len(embeds), dtype=torch.bool), list[int]()
    for index, each in enumerate(await encode(stack.addresses["encoder"], list(parts))):
        (item, kept), values = (plan.media[index], torch.tensor(each.kept)), torch.from_numpy(each.values[0].copy())
        places = torch.cat([torch.arange(run.offset, run.end) for run in item.runs])
        own = replace(plan, media=(item,))
        embeds[places] = features_of(reference, nemotron.model_inputs(own, {0: frames[index]}))
        if each.pruning.method == "pixel_change":
            embeds[places[kept]] = values
        torch.testing.assert_close(values, embeds[places[kept]], atol=1e-5, rtol=0)
        taken[places] = False
        taken[places[kept]] = True
        num_kept.append(len(kept))
    assert [each.num_kept for each in answer.usage.media] == num_kept
    assert answer.usage.prompt_tokens == int(taken.sum()) - len(said) + 1 < plan.tokens
    with torch.no_grad():
        logits = reference.language_model(inputs_embeds=embeds[taken][None]).logits[0, -len(said) :]
    logprobs = logits.log_softmax(dim=-1)
    assert logprobs.argmax(dim=-1).tolist() == said.tolist()
    assert answer.logprobs == pytest.approx(logprobs.max(dim=-1).values.tolist(), abs=1e-4)


@torch.no_grad()
def features_of(reference: Any, inputs: dict[str, Tensor]) -> Tensor:
    """transformers' embeddings of one item, (tokens, D)."""
    if "pixel_values" in inputs:
        (found,) = reference.get_image_features(inputs["pixel_values"], inputs["image_grid_hw"]).pooler_output
    elif "pixel_values_videos" in inputs:
        (found,) = reference.get_video_features(inputs["pixel_values_videos"]).pooler_output
    else:
        found = reference.get_audio_features(inputs["input_features"], inputs["input_features_mask"]).pooler_output
    features: Tensor = found
    return features


@pytest.mark.deep  # tests of the encoder and of preprocessing cover what differs from the omni
async def test_nano_vl_answers_as_the_omni_with_its_weights(tmp_path: Path) -> None:
    """Of images in one and in several tiles, of a video, and of the same pruned at the rate of the config."""
    nemotron_nano.write(tmp_path, 8, text={"time_step_min": 1e-6}, config={"video_pruning_rate": TRAINED_RATE})
    reference, video = load_reference("nemotron_nano_vl", tmp_path), Video(data=ODD, fps=8)
    with running(tmp_path) as stack:
        async with GridsieveClient(stack.addresses["generation"]) as client:
            for parts in ((video,), MIXES["two images"]):
                reference.video_pruning_rate = 0.0
                answer = await client.ask(list(parts), QUESTION, pruning_rate=0, **GREEDY)
                check_answer(answer, reference, await inputs_of(stack, parts, slice_frames=1))
            answer = await client.ask(video, QUESTION, **GREEDY)
        await check_pruned(stack, reference, video, answer, TRAINED_RATE, slice_frames=1)
