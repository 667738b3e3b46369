"""Quantised checkpoints, which transformers loads by itself: its quantizers know formats and the packages they need.

    config.json: quantization_config ─▶ transformers' quantizer ─▶ the whole model ─▶ its text model, its output layer

The whole model, since a config names what is left unquantised by its place in there. Its vision tower is let go again.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import transformers
from transformers.utils import logging

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from services.generation.families.text_model import assemble, check_text
from services.generation.model.attention import ATTENTION
from services.generation.model.language_model import LanguageModel
from services.generation.parallel.group import Group

_TOWER = "visual."
# Dequantised as they are read: the first's kernels would be fetched from the network when a question comes, and the
# second waits for a call of the whole model, which never comes here.
_DEQUANTISED = ("fp8", "compressed-tensors")


def is_quantised(checkpoint: Checkpoint) -> bool:
    return bool(_settings(checkpoint))


def load_quantised(
    checkpoint: Checkpoint,
    config: Any,
    whole_class: Any,
    text_class: Any,
    embed_levels: int,
    dtype: torch.dtype,
    device: torch.device,
    group: Group | None,
) -> LanguageModel:
    """A checkpoint's language model on `device`; what of it is not quantised in `dtype`.

    config, whole_class: of the whole model; text_class: transformers' own for its text, or one that only overrides it.
    Raises StartupError, naming the method, for one that is not known or lacks a package, for weights that are missing
    or unknown, what this engine's attention lacks, and a group.
    """
    if group is not None:
        raise StartupError(f"--tensor-parallel {group.ranks}: quantised checkpoints run in one process alone")
    check_text(config.text_config)
    said = _settings(checkpoint)
    in_bits = said.get("load_in_4bit") or said.get("load_in_8bit")  # how bitsandbytes said it before it had a name
    method = said.get("quant_method") or ("bitsandbytes" if in_bits else None)
    # Imported where it is needed: it brings every quantizer's packages along, as far as they are installed.
    quantizers = importlib.import_module("transformers.quantizers.auto").AutoHfQuantizer
    if method is None or not quantizers.supports_quant_method(said):
        raise StartupError(
            f"config.json: quantization_config.quant_method {method!r} is not among those that transformers "
            f"{transformers.__version__} loads"
        )
    if method in _DEQUANTISED:
        said = said | {"dequantize": True}
    config.quantization_config = said
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what it would warn of is checked here
    logging.disable_progress_bar()
    try:
        whole, report = whole_class.from_pretrained(
            checkpoint.folder,
            config=config,
            dtype=dtype,
            device_map={"": device},
            use_safetensors=True,  # nothing else, which might be unpickled
            output_loading_info=True,
        )
    except (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise StartupError(
            f"the checkpoint is quantised by {method!r}, and transformers cannot load it here: {error}"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    missing, unknown = (
        sorted(name for name in report[f"{kind}_keys"] if _TOWER not in name) for kind in ("missing", "unexpected")
    )
    if missing or unknown:
        raise StartupError(
            f"config.json and the quantised weights disagree: missing weights {missing}, unknown weights {unknown}"
        )
    text = whole.model.language_model
    text.__class__ = text_class
    text.config._attn_implementation = ATTENTION
    if method in _DEQUANTISED:  # what was never quantised still has the type that it is stored in
        for parameter in (*text.parameters(), *whole.lm_head.parameters()):
            parameter.data = parameter.data.to(dtype)
    return assemble(config, text, whole.lm_head, embed_levels)


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    return dict(config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {})
