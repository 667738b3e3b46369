"""The model of a run that starts the services without `--model`: random weights, in Qwen2.5-VL's layout.

How long a forward takes depends on the sizes of the weights, not on their values. The sizes have the proportions of
Qwen2.5-VL's text model and tower; all else is the embedded model's. It knows nothing of loads.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np

from gridsieve.common.checkpoint import DEMO_MODEL

DESCRIPTION = "random weights (73 M parameters): answers mean nothing, times are those of a model of this size"
# Compiling takes longer than the run, and changes its times by little.
FLAGS = {"encoder": ("--compile=off",), "generation": ("--compile=off",)}
_TEXT = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 2752,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "layer_types": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
}
_VISION = {
    "depth": 8,
    "hidden_size": 320,
    "intermediate_size": 864,
    "num_heads": 4,
    "out_hidden_size": 512,
    "window_size": 112,
    "fullatt_block_indexes": [1, 3, 5, 7],
}
_MAX_PIXELS = 320 * 280  # of a frame
# By the first word of a tensor's name: how many layers, and the sizes that stand for those of the embedded model.
_LARGER = {
    "model": (9, {525: 32_000, 192: 512, 384: 2752, 64: 128}),
    "visual": (8, {96: 320, 288: 960, 256: 864, 384: 1280, 192: 512}),
}
_LAYER = re.compile(r"\.(layers|blocks)\.(\d+)\.")


def write_model(folder: Path) -> None:
    """Writes the checkpoint into a folder that exists: 290 MB, float32."""
    from safetensors.numpy import save_file  # imported on use: it comes with the services

    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    for path in folder.glob("*preprocessor_config.json"):
        settings = json.loads(path.read_text())
        settings["size"]["longest_edge"] = _MAX_PIXELS
        path.write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= _TEXT
    config["vision_config"] |= _VISION
    (folder / "config.json").write_text(json.dumps(config))
    draw, tensors = np.random.default_rng(0).standard_normal, {}
    for name, shape in _shapes().items():
        one = "norm" in name or "ln_q" in name
        tensors[name] = np.ones(shape, np.float32) if one else np.float32(0.02) * draw(shape, np.float32)
    save_file(tensors, folder / "model.safetensors")


def _shapes() -> dict[str, tuple[int, ...]]:
    """By name: the embedded model's with larger sizes, and its first layers as often as there are layers."""
    from safetensors import safe_open

    shapes = {}
    with safe_open(DEMO_MODEL / "model.safetensors", "numpy") as embedded:
        for name in embedded.keys():  # noqa: SIM118  (no mapping)
            layers, larger = _LARGER[name.partition(".")[0]]
            shape = tuple(larger.get(size, size) for size in embedded.get_slice(name).get_shape())
            layer = _LAYER.search(name)
            if layer is None:
                shapes[name] = shape
            elif layer[2] == "0":
                shapes |= {_LAYER.sub(rf".\1.{index}.", name): shape for index in range(layers)}
    return shapes
