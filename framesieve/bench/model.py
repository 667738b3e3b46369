"""The model of a run that starts the services without `--model`: random weights, in Qwen2.5-VL's layout.

How long a forward takes depends on the sizes of the weights, not on their values. The sizes have the proportions of
Qwen2.5-VL's text model and tower; tokenizer, template and processors are the embedded model's. It knows nothing of
loads.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from framesieve.common.checkpoint import DEMO_MODEL

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


def write_model(folder: Path) -> None:
    """Writes the checkpoint into a folder that exists: 290 MB, float32."""
    import torch  # imported on use: slow, and other commands do not need it
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.utils.logging import disable_progress_bar

    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    for path in folder.glob("*preprocessor_config.json"):
        settings = json.loads(path.read_text())
        settings["size"]["longest_edge"] = _MAX_PIXELS
        path.write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {**_TEXT, "layer_types": None}
    config["vision_config"] |= _VISION
    disable_progress_bar()
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**config)).save_pretrained(folder)
