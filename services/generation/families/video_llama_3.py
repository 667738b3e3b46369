"""VideoLLaMA 3's language model: Qwen2, with one-dimensional positions.

Source: `VideoLlama3ForConditionalGeneration` of transformers 5.24; arXiv 2501.13106.
"""

from __future__ import annotations

from transformers import VideoLlama3Config, VideoLlama3ForConditionalGeneration

from framesieve.services.generation.families.llava import linear_family

FAMILY = linear_family(VideoLlama3Config, VideoLlama3ForConditionalGeneration)
