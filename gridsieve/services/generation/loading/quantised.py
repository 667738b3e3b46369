"""Quantised checkpoints, loaded by transformers, whose quantizers know the formats and the packages they need.

What is stored in fp8 by blocks, and in 4 bits, is read by this project's own code instead.

    config.json: quantization_config ─▶ transformers' quantizer ─▶ the whole model ─▶ its text model, its output layer

The whole model is loaded because a config names unquantised modules by their path in it. The vision tower is dropped.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import transformers
from transformers.utils import logging

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.generation.loading.quantization_config import OF_ACTIVATIONS, quantization_settings
from gridsieve.services.generation.loading.text_model import assemble, check_text
from gridsieve.services.generation.model.attention import ATTENTION
from gridsieve.services.generation.model.language_model import LanguageModel

# The name of the text model in the whole one, in every family that is loaded here.
TEXT_OF_WHOLE = "model.language_model."
_TOWER = "visual."
# Dequantised while loading: transformers would download its kernels of fp8 at the first request, and compressed-tensors
# prepares its layers in the forward of the whole model, which is never called here.
_DEQUANTISED = ("fp8", "compressed-tensors")


def load_quantised(
    checkpoint: Checkpoint,
    config: Any,
    whole_class: Any,
    text_class: Any,
    embed_levels: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LanguageModel:
    """A quantised checkpoint's language model on `device`; its unquantised weights in `dtype`.

    config, whole_class: of the whole model, whose text model is TEXT_OF_WHOLE. text_class: transformers' text class, or
    a subclass that adds no state.
    Raises StartupError, with the method, for an unknown method or a missing package; for missing or unknown weights,
    and attention features that the engine does not support.
    """
    check_text(config.text_config)
    quantization = quantization_settings(checkpoint)
    in_bits = quantization.get("load_in_4bit") or quantization.get("load_in_8bit")  # bitsandbytes' old format
    method = quantization.get("quant_method") or ("bitsandbytes" if in_bits else None)
    # Imported here because it imports the packages of every quantizer that is installed.
    quantizers = importlib.import_module("transformers.quantizers.auto").AutoHfQuantizer
    if method is None or not quantizers.supports_quant_method(quantization):
        raise StartupError(
            f"config.json: quantization_config.quant_method {method!r} is not supported by transformers "
            f"{transformers.__version__}"
        )
    if method in _DEQUANTISED:
        quantization = quantization | {"dequantize": True}
    config.quantization_config = quantization
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the conditions that it warns of are checked below
    logging.disable_progress_bar()
    try:
        whole, report = whole_class.from_pretrained(
            checkpoint.folder,
            config=config,
            dtype=dtype,
            device_map={"": device},
            use_safetensors=True,  # never unpickle weights
            output_loading_info=True,
        )
    except (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise StartupError(
            f"the checkpoint is quantised by {method!r}, and transformers cannot load it here: {error}"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    missing, unknown = (
        sorted(name for name in report[f"{kind}_keys"] if _TOWER not in name and not OF_ACTIVATIONS.search(name))
        for kind in ("missing", "unexpected")
    )
    if missing or unknown:
        raise StartupError(
            f"config.json and the quantised weights disagree: missing weights {missing}, unknown weights {unknown}"
        )
    text = whole.model.language_model
    text.__class__ = text_class
    text.config._attn_implementation = ATTENTION
    if method in _DEQUANTISED:  # weights that were never quantised still have the dtype of the file
        for parameter in (*text.parameters(), *whole.lm_head.parameters()):
            parameter.data = parameter.data.to(dtype)
    return assemble(config, text, whole.lm_head, embed_levels)
