"""SmolVLM2's language models: Llama's, under weight names of their own. Source: transformers 5.24."""

from __future__ import annotations

from dataclasses import replace

from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

from gridsieve.families.parts.linear_text import linear_family

FAMILY = replace(linear_family(SmolVLMConfig, SmolVLMForConditionalGeneration), prefixes=("model.text_model.",))
