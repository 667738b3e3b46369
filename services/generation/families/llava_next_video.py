"""LLaVA-NeXT-Video's language model, and its newline, a stored vector.

Source: `LlavaNextVideoForConditionalGeneration` of transformers 5.24; weight names of llava-hf/LLaVA-NeXT-Video-7B-hf.
"""

from __future__ import annotations

from transformers import LlavaNextVideoConfig, LlavaNextVideoForConditionalGeneration

from framesieve.services.generation.families.llava import NEWLINES, linear_family

FAMILY = linear_family(LlavaNextVideoConfig, LlavaNextVideoForConditionalGeneration, stored=NEWLINES)
