"""Nemotron H Omni: tiny checkpoints, made by transformers' own class, and its processors to compare with.

The image and the video processor cannot be imported without torchvision, so their source is compiled here without it.
"""

from __future__ import annotations
import __future__

import ast
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    NemotronH_Omni_Reasoning_V3,
    NemotronH_Omni_Reasoning_V3_Config,
    ParakeetFeatureExtractor,
)
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_transforms import group_images_by_shape, reorder_images
from transformers.models.nemotron_h_omni.processing_nemotron_h_omni import NemotronH_Omni_Reasoning_V3Processor
from transformers.video_utils import VideoMetadata, group_videos_by_shape, reorder_videos

from demo.checkpoint import TINY, make_tokenizer, randomise
from gridsieve.common.contract.plan import Modality, PromptPlan
from tests.families.family import FamilyUnderTest

MODEL: Any = NemotronH_Omni_Reasoning_V3
PATCH_PX, MERGE, TUBELET, HIDDEN = 16, 2, 2, 64
# There is no <video>: the chat template writes it as text.
TOKENS = ("<image>", "<img>", "</img>", "<so_embedding>", "<so_start>", "<so_end>")
# One group of experts of two, chosen first; time steps that the scan raises to `time_step_min`.
TEXT: Mapping[str, Any] = {
    "hidden_size": HIDDEN,
    "layers_block_type": [
        "linear_attention",
        "mlp",
        "linear_attention",
        "full_attention",
        "moe",
        "linear_attention",
        "full_attention",
        "mlp",
    ],
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32768,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 16,
    "time_step_min": 0.01,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 32,
}
VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "mlp_ratio": 2.0,
    "patch_size": PATCH_PX,
    "image_size": 4 * PATCH_PX,
    "max_img_size": 8 * PATCH_PX,
    "num_cls_tokens": 3,
    "num_registers": 7,
    "video_temporal_patch_size": TUBELET,
}
# Of which sounds have at most 12 s.
AUDIO: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "subsampling_conv_channels": 8,
    "num_mel_bins": 16,
    "max_position_embeddings": 150,
    "convolution_bias": False,
    "projection_hidden_size": 40,
    "projection_bias": False,
}
# All processors read this file.
SETTINGS: Mapping[str, Any] = {
    "image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor",
    "video_processor_type": "NemotronH_Omni_Reasoning_V3VideoProcessor",
    "processor_class": "NemotronH_Omni_Reasoning_V3Processor",
    "norm_mean": [0.48145466, 0.4578275, 0.40821073],
    "norm_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": PATCH_PX,
    "downsample_ratio": 1 / MERGE,
    "min_num_patches": 16,
    "max_num_patches": 100,
    "max_model_len": 32768,
    "video_target_num_patches": 36,
    "video_maintain_aspect_ratio": True,
}


def write(
    folder: Path, seed: int, text: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None
) -> Any:
    """Writes a checkpoint with random float32 weights, and returns its model.

    text: what differs of its text config; with num_nextn_predict_layers 1 a norm follows the tower.
    config: what differs of its config, as video_pruning_rate.
    """
    tokenizer = make_tokenizer(TINY)
    tokenizer.add_tokens(list(TOKENS), special_tokens=True)
    for kind in ("image", "video"):
        marked = f"<|vision_start|><|{kind}_pad|><|vision_end|>"
        tokenizer.chat_template = tokenizer.chat_template.replace(marked, f"<{kind}>")
    others = "{%- elif 'text' in part -%}"
    sounds = "{%- elif part['type'] == 'audio' -%}\n<so_embedding>\n"
    tokenizer.chat_template = tokenizer.chat_template.replace(others, sounds + others)
    ids = tokenizer.get_vocab()
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    fields: dict[str, Any] = {
        "text_config": {**TEXT, "vocab_size": len(tokenizer), "eos_token_id": ends[0], **(text or {})},
        "vision_config": dict(VISION),
        "audio_config": dict(AUDIO),
        "vision_hidden_size": VISION["hidden_size"],
        "projector_hidden_size": 80,
        "video_temporal_patch_size": TUBELET,
        "image_token_id": ids["<image>"],
        "audio_token_id": ids["<so_embedding>"],
        "tie_word_embeddings": False,
    }
    model = MODEL(NemotronH_Omni_Reasoning_V3_Config(**fields | dict(config or {})))
    randomise(model, 0.1, seed)
    _as_trained(model)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=ends)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    published = {name: each for name, each in load_file(path).items() if "layer_scale" not in name}
    save_file(published, path, {"format": "pt"})
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return model.eval()


@torch.no_grad()
def _as_trained(model: Any) -> None:
    """Gives the heads of Mamba layers decays from one token to hundreds, and sounds weights by which they differ. The
    layers of the tower have no scales, as in published files.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.copy_(torch.linspace(-3.0, 1.5, len(parameter)))
        if name.endswith("dt_bias"):
            parameter.copy_(torch.linspace(-6.0, 0.0, len(parameter)))
        if name.endswith(".D"):
            parameter += 1.0
        if name.endswith("lambda1"):
            parameter.fill_(1.0)
        if ".subsampling." in name and name.endswith("weight"):
            parameter *= 5.0
    for each in model.modules():
        if hasattr(each, "e_score_correction_bias"):
            each.e_score_correction_bias.copy_(torch.linspace(-0.1, 0.1, len(each.e_score_correction_bias)))
        if isinstance(each, torch.nn.BatchNorm1d):
            each.running_mean = torch.linspace(-0.5, 0.5, each.num_features)
            each.running_var = torch.linspace(0.2, 2.0, each.num_features)


@dataclass(frozen=True)
class Video:
    """The sampled frames of a video, uint8 (F, H, W, 3), their numbers in it, and its frames a second."""

    frames: NDArray[Any]
    indices: Sequence[int]
    fps: float


def processed(
    folder: Path,
    text: str,
    images: Sequence[NDArray[Any]] = (),
    videos: Sequence[Video] = (),
    sounds: Sequence[NDArray[np.float32]] = (),
) -> dict[str, Any]:
    """What transformers' processor makes of a text with <image>, <video> and <so_embedding>: input_ids, and the model's
    other inputs.

    images: uint8 (H, W, 3). All videos have one shape. sounds: samples at 16 kHz.
    """
    made: Any = object.__new__(NemotronH_Omni_Reasoning_V3Processor)
    made.tokenizer, made.video_temporal_patch_dim = AutoTokenizer.from_pretrained(folder), TUBELET
    made.image_processor, made.video_processor = image_processor(), video_processor()
    made.image_token, made.image_start_token, made.image_end_token = TOKENS[:3]
    made.video_token, made.audio_token, made.audio_start_token, made.audio_end_token = "<video>", *TOKENS[3:]
    made.feature_extractor = ParakeetFeatureExtractor(feature_size=AUDIO["num_mel_bins"])
    made.audio_sampling_rate, made.audio_hop_length, made.audio_subsampling_factor = 16_000, 160, 8
    inputs: dict[str, Any] = {}
    replaced: dict[str, list[str]] = {"images": [], "videos": [], "audio": []}
    if images:
        inputs = dict(made.image_processor(images))
        replaced["images"] = [made.replace_image_token(inputs, index) for index in range(len(images))]
    if videos:
        found = made.video_processor._preprocess([_planes(each.frames) for each in videos], return_tensors="pt")
        metadata = [
            VideoMetadata(total_num_frames=len(each.frames), fps=each.fps, frames_indices=list(each.indices))
            for each in videos
        ]
        labelled = {**found, "video_metadata": metadata}
        replaced["videos"] = [made.replace_video_token(labelled, index) for index in range(len(videos))]
        inputs["pixel_values_videos"] = found["pixel_values_videos"]
    if sounds:
        features, mask, tokens = made._process_audio(list(sounds), {})
        inputs |= {"input_features": features, "input_features_mask": mask}
        replaced["audio"] = [made.replace_audio_token({"num_tokens": tokens}, index) for index in range(len(sounds))]
    named = {f"{kind}_replacements": texts for kind, texts in replaced.items()}
    (expanded,), _ = made.get_text_with_replacements([text], **named)
    return {**inputs, "input_ids": made.tokenizer(expanded, add_special_tokens=False, return_tensors="pt")["input_ids"]}


def model_inputs(
    plan: PromptPlan, frames: Mapping[int, bytes | bytearray], slice_frames: int = TUBELET
) -> dict[str, Tensor]:
    """The model's inputs as `processed` names them, from a plan and the frames of each item as preprocessing sends.

    slice_frames: frames of a video's slice, which are repeated to a tubelet. Tiles of an image are images.
    """
    mean, std = (torch.tensor(SETTINGS[f"norm_{name}"]).view(3, 1, 1) for name in ("mean", "std"))
    patches, sides, tubelets, sounds = [], [], [], []
    for index, item in enumerate(plan.media):
        if item.modality is Modality.AUDIO:
            sounds.append(torch.frombuffer(bytearray(frames[index]), dtype=torch.float32).view(item.frames.size_px))
            continue
        shape = (item.frames.count, *item.frames.size_px, 3)
        shown = torch.frombuffer(bytearray(frames[index]), dtype=torch.float32).view(shape).movedim(-1, 1)
        pixels = (shown / 255 - mean) / std
        if item.modality is Modality.IMAGE:
            patches.append(F.unfold(pixels, PATCH_PX, stride=PATCH_PX).mT.flatten(0, 1))
            sides += [[side // PATCH_PX for side in item.frames.size_px]] * item.frames.count
        else:
            repeated = pixels.repeat_interleave(TUBELET // slice_frames, dim=0)
            tubelets.append(repeated.reshape(-1, 3 * TUBELET, *pixels.shape[2:]))
    ids = torch.from_numpy(plan.input_ids).long()[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if patches:
        inputs |= {"pixel_values": torch.cat(patches), "image_grid_hw": torch.tensor(sides)}
    if tubelets:
        inputs["pixel_values_videos"] = torch.stack(tubelets)
    if sounds:
        inputs["input_features"], inputs["input_features_mask"] = heard(sounds)
    return inputs


def heard(sounds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Features (n, frames, mels) as the feature extractor pads them, and their mask, of sounds (mels, frames)."""
    features = pad_sequence([each.T for each in sounds], batch_first=True)
    lengths = torch.tensor([each.shape[1] - 1 for each in sounds])
    return features, torch.arange(features.shape[1]) < lengths[:, None]


def video_processor(**settings: Any) -> Any:
    """The class of transformers without its base class. settings: override those in SETTINGS."""
    made = _compiled("video", "NemotronH_Omni_Reasoning_V3VideoProcessor")()
    vars(made).update({**SETTINGS, **settings})
    return made


def image_processor() -> Any:
    """transformers', with SETTINGS: a function of pictures, uint8 (H, W, 3)."""
    return _Images()


class _Images:
    downsample_ratio = SETTINGS["downsample_ratio"]

    def __call__(self, images: Sequence[NDArray[Any]]) -> Any:
        made = _compiled("image", "NemotronH_Omni_Reasoning_V3ImageProcessor")()
        names = ("patch_size", "downsample_ratio", "min_num_patches", "max_num_patches", "max_model_len")
        return made._preprocess(
            [_planes(each) for each in images],
            resample=3,
            do_rescale=True,
            rescale_factor=1 / 255,
            do_normalize=True,
            image_mean=SETTINGS["norm_mean"],
            image_std=SETTINGS["norm_std"],
            disable_grouping=True,
            return_tensors="pt",
            **{name: SETTINGS[name] for name in names},
        )


class _WithoutTorchvision:
    """Stands for the base classes. torchvision resizes float32 with this call."""

    def __init__(self, **_: Any) -> None: ...

    def resize(self, images: Tensor, size: Any, resample: Any) -> Tensor:
        return F.interpolate(images, (size.height, size.width), mode="bicubic", align_corners=False, antialias=True)

    def rescale_and_normalize(
        self, images: Tensor, rescales: bool, factor: float, normalises: bool, mean: Any, std: Any
    ) -> Tensor:
        return (images * factor - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


def picture_grid_of(*arguments: int) -> tuple[int, int]:
    """transformers' `get_patch_grid_size`."""
    grid: tuple[int, int] = _compiled("image", "get_patch_grid_size")(*arguments)
    return grid


@cache
def _compiled(kind: str, name: str) -> Any:
    """A class or function of the module of the image or the video processor."""
    path = Path(transformers.__file__).parent / f"models/nemotron_h_omni/{kind}_processing_nemotron_h_omni.py"
    nodes: list[Any] = [
        each for each in ast.parse(path.read_text()).body if isinstance(each, ast.ClassDef | ast.FunctionDef)
    ]
    for node in nodes:
        node.decorator_list = []
    names: dict[str, Any] = {
        "math": math,
        "torch": torch,
        "BatchFeature": BatchFeature,
        "SizeDict": SimpleNamespace,
        "PILImageResampling": SimpleNamespace(BICUBIC=3),
        "OPENAI_CLIP_MEAN": None,
        "OPENAI_CLIP_STD": None,
        "auto_docstring": lambda made: made,
        "ImagesKwargs": dict,
        "VideosKwargs": dict,
        "TorchvisionBackend": _WithoutTorchvision,
        "BaseVideoProcessor": _WithoutTorchvision,
        "group_images_by_shape": group_images_by_shape,
        "reorder_images": reorder_images,
        "group_videos_by_shape": group_videos_by_shape,
        "reorder_videos": reorder_videos,
    }
    kwargs = [each for each in nodes if each.name.endswith("Kwargs")]
    names |= {each.name: dict for each in kwargs}
    body = [each for each in nodes if each not in kwargs]
    exec(compile(ast.Module(body, []), str(path), "exec", flags=__future__.annotations.compiler_flag), names)
    return names[name]


def _planes(pixels: NDArray[Any]) -> Tensor:
    """(…, H, W, 3) to (…, 3, H, W)."""
    return torch.from_numpy(pixels).movedim(-1, -3)


def _written(folder: Path, seed: int) -> Path:
    write(folder, seed)
    return folder


FAMILIES: Mapping[str, FamilyUnderTest] = {
    "nemotron_h_omni": FamilyUnderTest(
        _written,
        MODEL,
        patch_px=PATCH_PX,
        merge=MERGE,
        temporal_patch=TUBELET,
        slices_stand_alone=True,
        text_prefix="language_model.backbone.",
        lm_head="language_model.lm_head.weight",
        linear=True,
    )
}
