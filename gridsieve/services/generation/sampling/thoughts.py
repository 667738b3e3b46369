"""Thoughts before an answer: `<think>` … `</think>`, opened by the prompt or by the model.

prompt  … <|im_start|>assistant\\n<think>\\n            Qwen3.5, Nemotron 3: the answer begins inside the thought
prompt  … <|im_start|>assistant\\n<think>\\n\\n</think>    thinking is off: the answer has none
prompt  … <|assistant|>\\n                              GLM, Qwen3: the model may open one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gridsieve.common.chat_templates import TemplateSource
from gridsieve.common.contract.plan import Int32Array
from gridsieve.services.generation.sampling.detokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
_LAST_TOKENS = 16
"""Of a prompt, how many may follow and spell its last mark."""


@dataclass(frozen=True, slots=True)
class Thought:
    """The thought of an answer. is_open: the prompt opened it; else the model may, as the first that it says."""

    is_open: bool


def thinks(templates: Sequence[TemplateSource]) -> bool:
    """Whether a checkpoint's templates know thoughts."""
    return any(CLOSE in template.text for template in templates)


def thought_after(prompt_ids: Int32Array, tokenizer: Tokenizer) -> Thought | None:
    """The thought after a prompt of a checkpoint that thinks; None: the prompt closed it. prompt_ids: int32 [N]."""
    end = tokenizer.decode(prompt_ids[-_LAST_TOKENS:].tolist(), skip_special_tokens=False).rstrip()
    return None if end.endswith(CLOSE) else Thought(end.endswith(OPEN))
