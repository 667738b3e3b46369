"""Language models of LLaVA 1.5, Mistral 3, LLaVA-NeXT-Video and LLaVA-OneVision.

In the last two a newline is a stored vector, whose id follows the vocabulary's last.
"""

from __future__ import annotations

from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextVideoConfig,
    LlavaNextVideoForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from gridsieve.families.parts.linear_text import linear_family
from gridsieve.services.generation.loading.text_family import StoredVectors

_NEWLINE = StoredVectors(("model.image_newline", "image_newline"))

LLAVA = linear_family(LlavaConfig, LlavaForConditionalGeneration)
MISTRAL3 = linear_family(Mistral3Config, Mistral3ForConditionalGeneration)
NEXT_VIDEO = linear_family(LlavaNextVideoConfig, LlavaNextVideoForConditionalGeneration, [_NEWLINE])
ONEVISION = linear_family(LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, [_NEWLINE])
