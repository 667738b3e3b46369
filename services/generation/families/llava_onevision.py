"""LLaVA-OneVision's language model, and its newline: a stored vector, whose id follows the vocabulary's last.

Source: `LlavaOnevisionForConditionalGeneration` of transformers 5.24; weight names of
llava-hf/llava-onevision-qwen2-7b-ov-hf.
"""

from __future__ import annotations

from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

from framesieve.services.generation.families.llava import NEWLINES, linear_family

FAMILY = linear_family(LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, stored=NEWLINES)
