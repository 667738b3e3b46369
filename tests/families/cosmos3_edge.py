"""Cosmos 3 Edge: tiny checkpoints in the layouts that there are, and its tower in transformers to compare with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Cosmos3EdgeConfig, Cosmos3EdgeForConditionalGeneration, GenerationConfig

from demo.checkpoint import TINY, make_tokenizer, randomise
from tests.families.family import FamilyUnderTest

PATCH_PX, MERGE, HIDDEN, TABLE_SIDE = 16, 2, 64, 6
TEXT: Mapping[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32768,
    # The published sections, 24, 20 and 20, are of heads eight times as large.
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
}
VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_patches": TABLE_SIDE**2,
    "patch_size": PATCH_PX,
    "spatial_merge_size": MERGE,
}
_PUBLISHED = {
    "q_proj": "to_q",
    "k_proj": "to_k",
    "v_proj": "to_v",
    "o_proj": "to_out",
    "fc1": "up_proj",
    "fc2": "down_proj",
}
# Of the model that makes videos.
_GENERATOR = {
    "layers.1.self_attn.add_q_proj.weight": (64, 64),
    "layers.1.self_attn.to_add_out.weight": (64, 64),
    "layers.1.self_attn.norm_added_k.weight": (16,),
    "layers.1.self_attn.k_norm_und_for_gen.weight": (16,),
    "layers.1.mlp_moe_gen.up_proj.weight": (96, 64),
    "layers.1.input_layernorm_moe_gen.weight": (64,),
    "norm_moe_gen.weight": (64,),
    "proj_in.weight": (64, 48),
    "time_embedder.linear_1.weight": (64, 64),
    "action_modality_embed": (64,),
}


def write(folder: Path, seed: int) -> Path:
    """A checkpoint with the names of transformers' modules."""
    tokenizer = make_tokenizer(TINY)
    ids = tokenizer.get_vocab()
    config = Cosmos3EdgeConfig(
        text_config={**TEXT, "vocab_size": len(tokenizer)},
        vision_config=dict(VISION),
        projector_hidden_size=80,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    model = Cosmos3EdgeForConditionalGeneration(config)
    randomise(model, 0.1, seed)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]])
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, save_original_format=False)
    tokenizer.save_pretrained(folder)
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": PATCH_PX, "merge_size": MERGE}
    for kind, size, own in (
        ("preprocessor", (64 * 64, 192 * 192), {"image_processor_type": "Cosmos3EdgeImageProcessor"}),
        (
            "video_preprocessor",
            (4 * 64 * 64, 16 * 128 * 128),
            {"video_processor_type": "Cosmos3EdgeVideoProcessor", "temporal_patch_size": 1},
        ),
    ):
        edges = {"shortest_edge": size[0], "longest_edge": size[1]}
        (folder / f"{kind}_config.json").write_text(json.dumps({**settings, **own, "size": edges}))
    return folder


def published(folder: Path) -> Path:
    """Gives a checkpoint the published layout: other names, files in folders, and the model that makes videos."""
    weights = load_file(folder / "model.safetensors")
    tower = {name: each for name, each in weights.items() if name.startswith(("model.visual.", "model.projector."))}
    others = {_published(name): each for name, each in weights.items() if name not in tower}
    drawn = torch.Generator().manual_seed(0)
    generator = {name: torch.randn(shape, generator=drawn) for name, shape in _GENERATOR.items()}
    places: dict[str, str] = {}
    for file, held in (
        ("transformer/diffusion_pytorch_model-00001-of-00001.safetensors", others | generator),
        ("vision_encoder/model.safetensors", tower),
    ):
        (folder / file).parent.mkdir()
        save_file(held, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(held, file)
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: file for name, file in places.items() if name not in generator}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def saved(folder: Path) -> Path:
    """Saves a checkpoint again as transformers does by default, which renames weights of the tower, too."""
    model = Cosmos3EdgeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def _published(name: str) -> str:
    name = name.removeprefix("model.language_model.")
    for own, stored in _PUBLISHED.items():
        name = name.replace(f".{own}.", f".{stored}.")
    return name


class Vision(nn.Module):
    """The tower and the projector of transformers' model, called as the towers of other families."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.visual, self.projector = model.visual, model.projector

    def forward(self, patches: Tensor, grid_thw: Tensor) -> SimpleNamespace:
        """patches: float32 (P, values). pooler_output: tokens (P / merge², D)."""
        features = self.visual(patches, grid_thw=grid_thw).last_hidden_state
        return SimpleNamespace(pooler_output=self.projector(features))

    def kept_embeds(self, patches: Tensor, places: list[tuple[int, int]], sides: tuple[int, int]) -> Tensor:
        """Tokens of the patches at these places of a frame, which see nothing but each other: (P / merge², D).

        sides: rows and columns of all patches of the frame.
        """
        embeddings = self.visual.embeddings
        table = embeddings.position_embedding.weight.view(TABLE_SIDE, TABLE_SIDE, -1).permute(2, 0, 1)[None]
        resized = F.interpolate(table, sides, mode="bilinear", align_corners=False, antialias=True)[0]
        rows = embeddings.patch_embedding(patches) + torch.stack([resized[:, row, column] for row, column in places])
        ends = torch.tensor([0, len(places)], dtype=torch.int32)
        for layer in self.visual.encoder.layers:
            rows = layer(rows, cu_seqlens=ends)
        tokens: Tensor = self.projector(self.visual.post_layernorm(rows))
        return tokens


FAMILIES: Mapping[str, FamilyUnderTest] = {
    "cosmos3_edge": FamilyUnderTest(
        write,
        Cosmos3EdgeForConditionalGeneration,
        patch_px=PATCH_PX,
        merge=MERGE,
        hidden=HIDDEN,
        slices_stand_alone=True,
        channels_last=True,
    )
}
