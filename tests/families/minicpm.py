"""MiniCPM-V as an oracle: transformers' tower with the published positions, its text model, and a plain resampler; and
checkpoints of it.

The weights have the published names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionEmbeddings, Idefics2VisionTransformer

from demo.checkpoint import TINY, make_tokenizer, randomise
from tests.families.family import FamilyUnderTest

WIDTH, PATCH_PX, IMAGE_PX, SCALE_PX = 128, 14, 70, 56
QUERIES: dict[str, int] = {"2.5": 6, "2.6": 4, "4.0": 4, "4.5": 4}
MARKS = ("<unk>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>", "<ref>", "</ref>")
VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": IMAGE_PX,
    "patch_size": PATCH_PX,
}
TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# As published: the limit of the short frequencies is above the longest context.
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + number / 8 for number in range(16)],
    "long_factor": [4 + number / 2 for number in range(16)],
    "original_max_position_embeddings": 32786,
}
TEXT_CLASSES: Mapping[str, tuple[Any, Any]] = {
    "2.5": (LlamaConfig, LlamaForCausalLM),
    "2.6": (Qwen2Config, Qwen2ForCausalLM),
    "4.0": (LlamaConfig, LlamaForCausalLM),
    "4.5": (Qwen3Config, Qwen3ForCausalLM),
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class PlainResampler(nn.Module):
    """A picture or a group of frames at a time, with PyTorch's attention."""

    def __init__(self, queries: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(queries, WIDTH))
        self.kv_proj = nn.Linear(VISION["hidden_size"], WIDTH, bias=False)
        self.attn = nn.MultiheadAttention(WIDTH, WIDTH // 128)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(WIDTH, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, patches: Tensor, rows: int, columns: int, times: Sequence[int | None]) -> Tensor:
        """Of a frame for each time: (frames · rows · columns, width of the tower) to (queries, WIDTH)."""
        values = self.ln_kv(self.kv_proj(patches))
        places = torch.stack(
            [
                place_embedding(i // columns, i % columns) + time_embedding(time)
                for time in times
                for i in range(rows * columns)
            ]
        )
        found, _ = self.attn(self.ln_q(self.query), values + places, values)
        return self.ln_post(found) @ self.proj


def place_embedding(row: int, column: int) -> Tensor:
    """The column in the first half, the row in the second; of each, sines before cosines."""
    quarter = WIDTH // 4
    waves = [1 / 10000 ** (i / quarter) for i in range(quarter)]
    return torch.tensor([turn(at * wave) for at in (column, row) for turn in (math.sin, math.cos) for wave in waves])


def time_embedding(number: int | None) -> Tensor:
    """Sines before cosines of the number of a tenth of a second; zeros without a time."""
    if number is None:
        return torch.zeros(WIDTH)
    angles = [number / 10000 ** (i / (WIDTH // 2)) for i in range(WIDTH // 2)]
    return torch.tensor([turn(angle) for turn in (math.sin, math.cos) for angle in angles])


class PublishedEmbeddings(Idefics2VisionEmbeddings):
    """Of pictures without padding. transformers 5 computes where a patch begins otherwise than the published code."""

    def forward(self, pixel_values: Tensor, patch_attention_mask: Tensor) -> Tensor:
        side = self.num_patches_per_side
        borders = torch.arange(1 / side, 1.0, 1 / side)
        row, column = (
            torch.bucketize(torch.arange(0, 1 - 1e-6, (1 / length).item()), borders, right=True)
            for length in (patch_attention_mask[0, :, 0].sum(), patch_attention_mask[0, 0].sum())
        )
        patches = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        rows: Tensor = patches + self.position_embedding((row[:, None] * side + column).flatten())
        return rows


class MiniCPM(nn.Module):
    def __init__(self, version: str, vocabulary: int) -> None:
        super().__init__()
        config, model = TEXT_CLASSES[version]
        self.llm = model(config(**text_of(version), vocab_size=vocabulary))
        self.in_a_row = version == "2.5"
        vision = Idefics2VisionConfig(**VISION)
        self.vpm = Idefics2VisionTransformer(vision)
        self.vpm.embeddings = PublishedEmbeddings(vision)
        self.resampler = PlainResampler(QUERIES[version])

    def picture(self, pixels: Tensor) -> Tensor:
        """Tokens of one picture, uint8 (H, W, 3): (queries, WIDTH)."""
        return self.group(pixels[None], [None])

    def group(self, frames: Tensor, times: Sequence[int | None]) -> Tensor:
        """Tokens of a group of frames, uint8 (F, H, W, 3): (queries, WIDTH)."""
        rows, columns = frames.shape[1] // PATCH_PX, frames.shape[2] // PATCH_PX
        normalised = (frames.permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
        mask = torch.ones(1, rows, columns, dtype=torch.bool)
        if self.in_a_row:
            cut = normalised.unflatten(2, (rows, PATCH_PX)).unflatten(4, (columns, PATCH_PX))
            normalised, mask = cut.permute(0, 1, 3, 2, 4, 5).flatten(3), mask.view(1, 1, -1)
        features = [self.vpm(each[None], mask).last_hidden_state[0] for each in normalised]
        found: Tensor = self.resampler(torch.cat(features), rows, columns, times)
        return found


class WholeText(nn.Module):
    """The language model under the names that the parts of a whole model of transformers have."""

    def __init__(self, llm: Any) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.language_model = llm.model
        self.lm_head = llm.lm_head
        self.generate = llm.generate


def text_of(version: str) -> dict[str, Any]:
    """The language model's part of a config, without the vocabulary."""
    return {**TEXT, "rope_scaling": dict(LONGROPE)} if version == "4.0" else TEXT


def read_text(folder: Path) -> WholeText:
    """The language model of a checkpoint that `write` wrote."""
    config = json.loads((folder / "config.json").read_text())
    version = str(config["version"])
    make, model = TEXT_CLASSES[version]
    llm = model(make(**{name: config[name] for name in (*text_of(version), "vocab_size")}))
    weights = load_file(folder / "model.safetensors")
    own = {name[4:]: value for name, value in weights.items() if name.startswith("llm.")}
    llm.load_state_dict(own, strict=not config["tie_word_embeddings"])
    return WholeText(llm.eval())


def write(folder: Path, seed: int, version: str = "2.6", changes: Mapping[str, Any] = {}) -> MiniCPM:
    """Writes a checkpoint in the published layout, with random weights, and returns its oracle.

    changes: of config.json; None leaves a field out.
    """
    tokenizer = make_tokenizer(TINY)
    tokenizer.add_tokens(list(MARKS), special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    model = MiniCPM(version, len(tokenizer)).eval()
    randomise(model, 0.1, seed)
    save_file({name: value.clone() for name, value in model.state_dict().items()}, folder / "model.safetensors")
    ids = tokenizer.get_vocab()
    config = {
        "model_type": "minicpmv",
        "architectures": ["MiniCPMV"],
        "version": float(version),
        **text_of(version),
        "vocab_size": len(tokenizer),
        "eos_token_id": ids["<|im_end|>"],
        "query_num": QUERIES[version],
        "image_size": 448,
        "patch_size": PATCH_PX,
        "drop_vision_last_layer": False,
        "slice_mode": True,
        "use_image_id": True,
        "slice_config": {"max_slice_nums": 9, "patch_size": PATCH_PX, "scale_resolution": SCALE_PX},
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        **changes,
    }
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]})
    )
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_processor_type": "MiniCPMVImageProcessor",
                "max_slice_nums": 9,
                "scale_resolution": SCALE_PX,
                "patch_size": PATCH_PX,
                "image_feature_size": QUERIES[version],
                "norm_mean": [0.5, 0.5, 0.5],
                "norm_std": [0.5, 0.5, 0.5],
                "im_start": "<image>",
                "im_end": "</image>",
                "slice_start": "<slice>",
                "slice_end": "</slice>",
                "unk": "<unk>",
                "im_id_start": "<image_id>",
                "im_id_end": "</image_id>",
                "slice_mode": True,
                "use_image_id": True,
            }
        )
    )
    return model


def _written(folder: Path, seed: int, version: str) -> Path:
    write(folder, seed, version)
    return folder


FAMILIES: Mapping[str, FamilyUnderTest] = {
    f"minicpmv_{version.replace('.', '_')}": FamilyUnderTest(
        partial(_written, version=version),
        TEXT_CLASSES[version][1],
        patch_px=PATCH_PX,
        merge=1,
        hidden=WIDTH,
        slices_stand_alone=True,
        text_prefix="llm.model.",
        lm_head="llm.lm_head.weight",
        linear=True,
        rows_stand_alone=True,
        model_type="minicpmv",
    )
    for version in ("2.5", "2.6", "4.0", "4.5")
}
