"""Ovis2's language models: those of LLaVA's layout, and the last rows of the tower's table.

Source: transformers 5.24.
"""

from __future__ import annotations

from transformers import Ovis2Config, Ovis2ForConditionalGeneration

from gridsieve.families.parts.linear_text import linear_family
from gridsieve.services.generation.loading.text_family import StoredVectors

_INDICATORS = StoredVectors(
    ("model.visual_embeddings_table.weight", "visual_embeddings_table.weight"),
    lambda config: slice(-config.vision_config.num_visual_indicator_tokens, None),
)
FAMILY = linear_family(Ovis2Config, Ovis2ForConditionalGeneration, [_INDICATORS])
