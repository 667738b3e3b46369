"""InternVL's language model, with one-dimensional positions.

Source: `InternVLForConditionalGeneration` of transformers 5.24; weight names of OpenGVLab/InternVL3-8B-hf.
"""

from __future__ import annotations

from transformers import InternVLConfig, InternVLForConditionalGeneration

from framesieve.services.generation.families.llava import linear_family

FAMILY = linear_family(InternVLConfig, InternVLForConditionalGeneration)
