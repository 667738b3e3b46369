"""Answers of transformers' whole model, from the ids and frames that preprocessing makes of a prompt."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from gridsieve.client.answer import Answer
from gridsieve.client.encoding import Encoded
from gridsieve.client.messages import generate_request
from gridsieve.client.prompt import Part, user_turn
from gridsieve.common.channels import open_channel
from gridsieve.common.contract.plan import Modality, PromptPlan
from gridsieve.common.contract.wire import PlanReceiver
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.preprocessing_pb2 import PreprocessRequest
from gridsieve.v1.preprocessing_pb2_grpc import PreprocessingServiceStub
from tests.families import FamilyUnderTest, nemotron, text_and_head
from tests.vision import patches_of

NEW_TOKENS = 8
# Below this distance of the two best logits, either token is right.
CLEAR_MARGIN = 2e-4


async def plan_and_slices(
    preprocessing: str, prompt: prompt_pb2.Prompt
) -> tuple[PromptPlan, dict[tuple[int, int], bytearray]]:
    """The plan of a prompt, and the slices of its items by item and first frame."""
    requests = [
        PreprocessRequest(prompt=prompt),
        PreprocessRequest(select=prompt_pb2.Select(all=True)),
    ]
    receiver, plan, slices = PlanReceiver(), None, defaultdict[tuple[int, int], bytearray](bytearray)
    async with open_channel(preprocessing) as channel:
        async for response in PreprocessingServiceStub(channel).Preprocess(iter(requests)):
            if response.HasField("plan"):
                plan = receiver.take_message(response.plan) or plan
            else:
                slices[response.frames.media_index, response.frames.first_frame] += response.frames.chunk.data
    assert plan is not None
    return plan, slices


async def plan_and_frames(
    preprocessing: str, prompt: prompt_pb2.Prompt
) -> tuple[PromptPlan, defaultdict[int, bytearray]]:
    """The plan of a prompt, and the frames of each item, whole."""
    plan, slices = await plan_and_slices(preprocessing, prompt)
    frames = defaultdict[int, bytearray](bytearray)
    for (index, _), data in sorted(slices.items()):
        frames[index] += data
    return plan, frames


async def model_inputs(
    preprocessing: str, parts: Sequence[Part], question: str, family: FamilyUnderTest, folder: Path, config: Any
) -> dict[str, Tensor]:
    """The inputs that transformers' processor makes of the ids and frames of that service."""
    prompt = generate_request([user_turn(list(parts), question)], {}).prompt
    return await inputs_of_prompt(preprocessing, prompt, family, folder, config)


async def inputs_of_prompt(
    preprocessing: str, prompt: prompt_pb2.Prompt, family: FamilyUnderTest, folder: Path, config: Any
) -> dict[str, Tensor]:
    """`model_inputs` of a prompt."""
    plan, frames = await plan_and_frames(preprocessing, prompt)
    ids = torch.from_numpy(plan.input_ids.astype(np.int64))[None]
    if family.inputs is not None:
        return family.inputs(plan, frames, folder, config)
    if config.model_type in ("llava_onevision", "llava_next_video", "internvl"):
        return _tiled(plan, frames, folder, config)
    if config.model_type == "nemotron_h_omni":
        return nemotron.model_inputs(plan, frames, family.temporal_patch)
    if config.model_type == "video_llama_3":
        return _merging(plan, frames, ids, folder, family)
    if family.linear:
        shapes = [(*item.frames.size_px, 3) for item in plan.media]
        shown = [frames[index] for index in range(len(shapes))]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **_images(shown, shapes, folder, config)}
    types = torch.zeros_like(ids)
    for item in plan.media:
        for run in item.runs:
            types[0, run.offset : run.end] = 1 if item.modality is Modality.IMAGE else 2
    if config.model_type in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"):
        return _omni(plan, frames, ids, folder, family)
    if config.model_type.startswith("glm"):
        return _slices_as_images(plan, frames, ids, types.clamp(max=1), folder, family)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": types,
        **_pictures(plan, frames, folder, family),
    }
    steps = [float(item.seconds_per_grid) for item in plan.media if item.seconds_per_grid]
    if steps and config.model_type == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor(steps)
    return inputs


def _pictures(
    plan: PromptPlan, frames: Mapping[int, bytearray], folder: Path, family: FamilyUnderTest
) -> dict[str, Tensor]:
    """Patches and grids of images and of videos."""
    inputs = {}
    for modality, pixels, grids in (
        (Modality.IMAGE, "pixel_values", "image_grid_thw"),
        (Modality.VIDEO, "pixel_values_videos", "video_grid_thw"),
    ):
        items = [(index, item) for index, item in enumerate(plan.media) if item.modality is modality]
        if items:
            sizes = [(item.frames.count, *item.frames.size_px, 3) for _, item in items]
            shown = [frames[index] for index, _ in items]
            inputs[pixels] = torch.cat(
                [
                    patches_of(np.frombuffer(data, np.uint8).reshape(size), folder, family)
                    for data, size in zip(shown, sizes, strict=True)
                ]
            )
            sides = [(item.grid.t, item.grid.h * family.merge, item.grid.w * family.merge) for _, item in items]
            inputs[grids] = torch.tensor(sides)
    return inputs


def _omni(
    plan: PromptPlan, frames: Mapping[int, bytearray], ids: Tensor, folder: Path, family: FamilyUnderTest
) -> dict[str, Any]:
    """What processors of Qwen's Omni models make; either all videos have their sound, or none."""
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= _pictures(plan, frames, folder, family)
    steps = [float(item.seconds_per_grid) for item in plan.media if item.seconds_per_grid]
    inputs |= {"video_second_per_grid": torch.tensor(steps)} if steps else {}
    sounds = [
        torch.from_numpy(np.frombuffer(frames[index], np.float32).reshape(item.frames.size_px).copy())
        for index, item in enumerate(plan.media)
        if item.modality is Modality.AUDIO
    ]
    if sounds:
        longest = max(each.shape[1] for each in sounds)
        inputs["input_features"] = torch.stack([pad(each, (0, longest - each.shape[1])) for each in sounds])
        lengths = torch.tensor([each.shape[1] for each in sounds])
        inputs["feature_attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
        inputs["use_audio_in_video"] = any(len(item.runs) > 1 for item in plan.media if item.seconds_per_grid)
    return inputs


def _merging(
    plan: PromptPlan, frames: Mapping[int, bytearray], ids: Tensor, folder: Path, family: FamilyUnderTest
) -> dict[str, Tensor]:
    """What VideoLLaMA 3's processor makes: patches of images are not merged."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for modality, pixels, kind, merge in (
        (Modality.IMAGE, "pixel_values", "image", 1),
        (Modality.VIDEO, "pixel_values_videos", "video", family.merge),
    ):
        items = [(frames[index], item) for index, item in enumerate(plan.media) if item.modality is modality]
        if items:
            shapes = [(item.frames.count, *item.frames.size_px, 3) for _, item in items]
            inputs[pixels] = torch.cat(
                [
                    patches_of(np.frombuffer(data, np.uint8).reshape(shape), folder, replace(family, merge=merge))
                    for (data, _), shape in zip(items, shapes, strict=True)
                ]
            )
            inputs[f"{kind}_grid_thw"] = torch.tensor(
                [(item.grid.t, item.grid.h * merge, item.grid.w * merge) for _, item in items]
            )
            inputs[f"{kind}_merge_sizes"] = torch.tensor([merge] * len(items))
    return inputs


def _slices_as_images(
    plan: PromptPlan,
    frames: Mapping[int, bytearray],
    ids: Tensor,
    types: Tensor,
    folder: Path,
    family: FamilyUnderTest,
) -> dict[str, Tensor]:
    """GLM's slices are images to its model, whose transformers takes no prompt with images and videos."""
    patches, sides = [], []
    for index, item in enumerate(plan.media):
        shown = np.frombuffer(frames[index], np.uint8).reshape(item.frames.count, *item.frames.size_px, 3)
        patches.append(patches_of(shown, folder, family))
        sides += [(1, item.grid.h * family.merge, item.grid.w * family.merge)] * item.grid.t
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": types,
        "pixel_values": torch.cat(patches),
        "image_grid_thw": torch.tensor(sides),
    }


def _tiled(plan: PromptPlan, frames: Mapping[int, bytearray], folder: Path, config: Any) -> dict[str, Tensor]:
    """What the processors of LLaVA-OneVision and LLaVA-NeXT-Video make: a newline is one more token of its item."""
    ids = plan.input_ids.astype(np.int64)
    for place in np.flatnonzero(ids == config.text_config.vocab_size):
        ids[place] = ids[place - 1]
    inputs = {"input_ids": torch.from_numpy(ids)[None], "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    mean, std = (torch.tensor(settings[name])[:, None, None] for name in ("image_mean", "image_std"))
    pixels = []
    for index, item in enumerate(plan.media):
        shape = (item.frames.count, *item.frames.size_px, 3)
        values = torch.from_numpy(np.frombuffer(frames[index], np.uint8).reshape(shape).copy()).permute(0, 3, 1, 2)
        pixels.append((values / 255 - mean) / std)
    images = [item.modality is Modality.IMAGE for item in plan.media]
    if any(images):
        shown = [each for each, is_image in zip(pixels, images, strict=True) if is_image]
        most = max(len(each) for each in shown)
        padded = [torch.cat([each, torch.zeros(most - len(each), *each.shape[1:])]) for each in shown]
        sizes = [item.file.source_px for item in plan.media if all(item.file.source_px)]
        inputs |= {"pixel_values": torch.stack(padded), "image_sizes": torch.tensor(sizes)}
        if config.model_type == "llava_onevision":
            inputs["batch_num_images"] = torch.tensor([len(shown)])
    if config.model_type == "internvl":
        return {
            "input_ids": inputs["input_ids"],
            "attention_mask": inputs["attention_mask"],
            "pixel_values": torch.cat(pixels),
        }
    if not all(images):
        inputs["pixel_values_videos"] = torch.stack(
            [each for each, is_image in zip(pixels, images, strict=True) if not is_image]
        )
    return inputs


def _images(
    shown: Sequence[bytearray], shapes: Sequence[tuple[int, int, int]], folder: Path, config: Any
) -> dict[str, Tensor]:
    """Frames as transformers' image processor makes them: normalised, and of several sizes padded to one."""
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    mean, std = np.array(settings["image_mean"]), np.array(settings["image_std"])
    height, width, _ = np.max(shapes, axis=0)
    pixels = torch.zeros(len(shapes), 3, height, width)
    for place, data, shape in zip(pixels, shown, shapes, strict=True):
        values = (np.frombuffer(data, np.uint8).reshape(shape) / 255 - mean) / std
        place[:, : shape[0], : shape[1]] = torch.from_numpy(values).permute(2, 0, 1)
    sizes = {"image_sizes": torch.tensor(shapes)[:, :2]} if config.vision_config.model_type == "pixtral" else {}
    return {"pixel_values": pixels, **sizes}


def check_answer(answer: Answer, model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Compares a greedy answer of NEW_TOKENS with log-probabilities with the model's; returns its first logits."""
    generated = model.generate(
        **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    logits = torch.cat(generated.logits)
    best, second = logits.topk(2, dim=-1).values.T
    assert (best - second > CLEAR_MARGIN).all(), "choose another clip: a tie proves nothing"
    expected = generated.sequences[0, inputs["input_ids"].shape[1] :]
    assert list(answer.token_ids) == expected.tolist()
    logprobs = logits.log_softmax(dim=-1).gather(1, expected[:, None])[:, 0]
    assert answer.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)
    return logits[0]


@torch.no_grad()
def check_pruned_answer(answer: Answer, model: Any, inputs: dict[str, Tensor], pad_id: int, video: Encoded) -> None:
    """Compares a greedy answer about one pruned video with the model's forward over the kept tokens, with their gaps.

    model: of one-dimensional positions. inputs: of the unpruned prompt. pad_id: of the video's tokens.
    """
    ids, said, (text, _) = inputs["input_ids"][0], torch.tensor(answer.token_ids), text_and_head(model)
    given: list[Tensor] = []
    hook = text.register_forward_pre_hook(lambda *call: given.append(call[2]["inputs_embeds"][0]), with_kwargs=True)
    model(**inputs)
    hook.remove()
    (full,) = given
    media = torch.nonzero(ids == pad_id)[: video.plan.grid.tokens, 0]  # without a newline after them
    kept = media[torch.tensor(video.kept)]
    torch.testing.assert_close(torch.from_numpy(video.values[0].copy()), full[kept], atol=1e-5, rtol=0)
    taken = torch.ones(len(ids), dtype=torch.bool)
    taken[media] = False
    taken[kept] = True
    embeds = torch.cat([full[taken], text.get_input_embeddings()(said[:-1])])
    gapped = torch.cat([torch.nonzero(taken)[:, 0], len(ids) + torch.arange(len(said) - 1)])
    logprobs, others = (
        model(
            inputs_embeds=embeds[None],
            position_ids=positions[None],
            attention_mask=torch.ones(1, len(embeds), dtype=torch.long),  # without it, gaps separate sequences
        )
        .logits[0, -len(said) :]
        .log_softmax(dim=-1)
        for positions in (gapped, torch.arange(len(embeds)))
    )
    best, second = logprobs.topk(2, dim=-1).values.T
    assert (best - second > CLEAR_MARGIN).all(), "choose another clip: a tie proves nothing"
    assert said.tolist() == logprobs.argmax(dim=-1).tolist()
    assert answer.logprobs == pytest.approx(best.tolist(), abs=1e-4)
    assert float((logprobs - others).abs().max()) > 0.001, "gaps that change nothing prove nothing"
