"""Mistral 3's language model: Mistral, with one-dimensional positions.

Source: `Mistral3ForConditionalGeneration` of transformers 5.24; weight names of
mistralai/Mistral-Small-3.1-24B-Instruct-2503.
"""

from __future__ import annotations

from transformers import Mistral3Config, Mistral3ForConditionalGeneration

from framesieve.services.generation.families.llava import linear_family

FAMILY = linear_family(Mistral3Config, Mistral3ForConditionalGeneration)
