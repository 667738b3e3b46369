"""InternVL's language models: those of LLaVA's layout. Source: transformers 5.24."""

from __future__ import annotations

from transformers import InternVLConfig, InternVLForConditionalGeneration

from gridsieve.families.parts.linear_text import linear_family

FAMILY = linear_family(InternVLConfig, InternVLForConditionalGeneration)
