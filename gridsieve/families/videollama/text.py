"""VideoLLaMA 3's language model: Qwen2 in LLaVA's layout. Source: transformers 5.24."""

from __future__ import annotations

from transformers import VideoLlama3Config, VideoLlama3ForConditionalGeneration

from gridsieve.families.parts.linear_text import linear_family

FAMILY = linear_family(VideoLlama3Config, VideoLlama3ForConditionalGeneration)
