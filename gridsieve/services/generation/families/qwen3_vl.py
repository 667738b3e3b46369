"""Qwen3-VL's language models, dense and mixture of experts: transformers' text classes, with weights found by prefix.

Source: Qwen3-VL, arXiv 2511.21631, and deepstack, arXiv 2406.04334; weight names of Qwen/Qwen3-VL-4B-Instruct and
Qwen/Qwen3-VL-30B-A3B-Instruct.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3VLConfig, Qwen3VLMoeConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLForConditionalGeneration,
    Qwen3VLTextModel,
    Qwen3VLTextRotaryEmbedding,
)
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import (
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLMoeTextModel,
    Qwen3VLMoeTextRotaryEmbedding,
)

from gridsieve.common.contract.retention import METHODS
from gridsieve.services.generation.loading import TextClasses, TextFamily

TEXT_PREFIX = "model.language_model."
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


class _Deepstack:
    """Adds deepstack features by row index; transformers uses a boolean mask, which makes the host wait for CUDA."""

    def _deepstack_process(self, hidden_states: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor) -> Tensor:
        return hidden_states.index_add(1, visual_pos_masks, visual_embeds[None])


class _Text(_Deepstack, Qwen3VLTextModel):
    pass


class _MoeText(_Deepstack, Qwen3VLMoeTextModel):
    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers searches the source file of the class for a decorator; without it experts run one by one.
        can_set: bool = Qwen3VLMoeTextModel._can_set_experts_implementation()
        return can_set


def transpose_experts(text: nn.Module, weights: dict[str, Tensor]) -> None:
    """Published checkpoints store the weights of experts with their last two axes swapped."""
    for name, parameter in text.named_parameters():
        if not name.endswith(EXPERTS) or name not in weights:
            continue
        experts, rows, columns = parameter.shape
        if weights[name].shape == (experts, columns, rows) != (experts, rows, columns):
            weights[name] = weights[name].transpose(1, 2).contiguous()


def _family(config_class: Any, classes: TextClasses) -> TextFamily:
    return TextFamily(
        lambda checkpoint: checkpoint.config_as(config_class),
        lambda _: classes,
        (TEXT_PREFIX,),
        embed_levels=lambda config: len(config.vision_config.deepstack_visual_indexes),
        # The dense model has no tensor-parallel plan, but its layers have the structure and names of Qwen3's.
        plan=Qwen3Config.base_model_tp_plan,
        change=transpose_experts,
        pruning_methods=METHODS,
        live=True,
    )


FAMILY = _family(Qwen3VLConfig, TextClasses(Qwen3VLForConditionalGeneration, _Text, Qwen3VLTextRotaryEmbedding))
MOE_FAMILY = _family(
    Qwen3VLMoeConfig, TextClasses(Qwen3VLMoeForConditionalGeneration, _MoeText, Qwen3VLMoeTextRotaryEmbedding)
)
